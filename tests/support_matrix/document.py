"""The support matrix as a document, written from measured cells and read back."""

import platform
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support_matrix.cells import (
    EXPERT_FEATURES,
    EXPERT_LAYOUTS,
    EXPERT_SCHEDULE_LAYOUTS,
    EXPERTS,
    FAMILIES,
    FAMILY_FEATURES,
    FAMILY_LAYOUTS,
    FEATURES,
    LAYOUTS,
    MODEL,
    NAMED_SCHEDULES,
    PP,
    ROWS,
    SCHEDULE_LAYOUTS,
    TP,
    Cell,
    name_of,
)
from torchtitan.telemetry.run_record import git_revision

Fields = dict[str, Any]
"""Fields of a cell."""


@dataclass(frozen=True)
class Table:
    """Cells by row and column, each of which sets some of their fields."""

    rows: dict[str, Fields]
    columns: dict[str, Fields]

    def cell(self, row: str, column: str) -> Cell:
        return Cell(**{"layout": TP} | self.rows[row] | self.columns[column])

    def write(self, results: dict[Cell, str]) -> str:
        lines = ["| | " + " | ".join(self.columns) + " |", "|---" * (len(self.columns) + 1) + "|"]
        for row in self.rows:
            texts = [results.get(self.cell(row, column), "") for column in self.columns]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
        return "\n".join(lines)

    def read(self, section: str) -> dict[Cell, str]:
        lines = [
            [part.strip() for part in line.split("|")[1:-1]]
            for line in section.splitlines()
            if "|" in line
        ]
        columns = lines[0][1:]
        return {
            self.cell(row, column): text
            for row, *texts in lines[2:]
            for column, text in zip(columns, texts, strict=True)
            if text
        }


def _layouts(layouts: Iterable[tuple[int, ...]], ep: int = 0) -> dict[str, Fields]:
    return {name_of(layout, ep): {"layout": layout, "ep": ep} for layout in layouts}


def _of_experts(layouts: Iterable[tuple[tuple[int, ...], int]]) -> dict[str, Fields]:
    return {
        name: fields for layout, ep in layouts for name, fields in _layouts([layout], ep).items()
    }


def _each(field: str, values: Iterable[str], **others: Any) -> dict[str, Fields]:
    return {value: {field: value, **others} for value in values}


TABLES = (
    Table(_layouts(LAYOUTS), _each("feature", FEATURES)),
    Table(_layouts(SCHEDULE_LAYOUTS), _each("schedule", NAMED_SCHEDULES)),
    Table(_of_experts(EXPERT_LAYOUTS), _each("feature", EXPERT_FEATURES)),
    Table(_of_experts(EXPERT_SCHEDULE_LAYOUTS), _each("schedule", NAMED_SCHEDULES[1:])),
    Table(_layouts(FAMILY_LAYOUTS), _each("family", FAMILIES)),
    Table(_each("feature", FAMILY_FEATURES, layout=TP), _each("family", FAMILIES)),
    Table(_each("schedule", NAMED_SCHEDULES, layout=PP), _each("family", FAMILIES)),
)
"""In the order of the document."""


def environment() -> str:
    """The code and machine that measure now."""
    commit = (git_revision() or "unknown")[:12]
    torch_version = f"torch {torch.__version__}, gloo, CPU, {platform.machine()}"
    return f"{time.strftime('%Y-%m-%d')}, commit {commit}, {torch_version}"


def document(results: dict[Cell, str], notes: list[str], measured: Iterable[str]) -> str:
    """The support matrix in Markdown.

    Args:
        measured: a line for each time that cells were measured: `environment`, and which.
    """
    tables = [table.write(results) for table in TABLES]
    footnotes = "\n".join(f"- [{number}] refused: {note}" for number, note in enumerate(notes, 1))
    measurements = "\n".join(f"- measured {line}" for line in measured)
    model = ", ".join(f"{name} {value}" for name, value in MODEL.items())
    experts = ", ".join(f"{name} {value}" for name, value in EXPERTS.items())
    return f"""# Support matrix

Generated from real runs by `python -m tests.support_matrix --output docs/reference/support-matrix.md`. Do not edit.

{measurements}

Each cell is a run of a tiny Llama ({model}; 4 layers, 8 with pp 4)
on gloo ranks, in fp32, with {ROWS} rows of 32 tokens per step: 10 steps in the column "plain" and for the schedules,
4 elsewhere. It is compared with plain PyTorch on one process. The numbers are the largest relative difference of the
loss over all steps, and the largest difference within any parameter's gradient of the first step, relative to the
gradient's largest element. Gradients of later steps, gradient norm, token counts, the update of every weight in every
step and validation loss are within tolerance too ([what is compared](../internals/numerics.md#what-is-compared)).

A number in brackets refers to the message below that refuses the configuration before anything starts. A cell is empty
where the feature has no effect, and, for the columns from "AC selective op" to "Muon" and for "async TP", where three
axes combine: every pair of them is measured in another row.

## Layouts and features

{tables[0]}

Pipelines above use the schedule 1F1B. "optimizer in backward" runs without clipping. "compile" is inductor with
selective activation checkpointing by operation. "float8" is rowwise and "float8 all-gather" tensorwise; both are
emulated, and so is MXFP8, which runs on a wider model. These three have wider tolerances, and so have the updates of
Muon, which are computed in bf16.

## Pipeline schedules

{tables[1]}

## Mixture of experts

The same for a tiny Qwen3-MoE ({experts}), whose experts are balanced by a
routing bias, by auxiliary losses of each row and of the global batch, and by the router z-loss, all at once. `ep` is
`parallelism.expert_parallel_degree`, whose ranks are those of dp_shard, cp and tp. The routing biases are compared
too. "moved" counts tokens, at least, that were sent to another expert than on one process, over all steps and layers.
Most columns are measured on up to four ranks. In "float8" the products of experts are rounded too.

{tables[2]}

## Pipeline schedules with experts

{tables[3]}

## Families and layouts

The same for tiny models of the families with other kinds of blocks, with all that the family has: latent attention and
a module that predicts further tokens (`deepseek_v3`), routers with sigmoid scores and shared experts, Gated DeltaNet and
gated attention (`qwen3_next`), sinks and windows (`gpt_oss`), norms over the whole projection (`olmo3`), norms on both
sides (`gemma3`). Experts are shared by all ranks of a pipeline stage.

{tables[4]}

## Families and features

With tensor parallelism over two ranks.

{tables[5]}

## Families and pipeline schedules

With two pipeline ranks.

{tables[6]}

## Refused

{footnotes}
"""  # noqa: E501


def read_document(text: str) -> tuple[dict[Cell, str], list[str], list[str]]:
    """Inverse of `document`: the cells' texts, the refusals in order, and `measured`."""
    measured = re.findall(r"^- measured (.*)", text, re.M)
    *sections, refusals = text.split("\n## ")[1:]
    results: dict[Cell, str] = {}
    for table, section in zip(TABLES, sections, strict=False):
        results |= table.read(section)
    return results, re.findall(r"- \[\d+\] refused: (.*)", refusals), measured
