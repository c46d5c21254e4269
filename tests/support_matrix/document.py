"""The support matrix as a document, written from measured cells and read back."""

import platform
import re
from collections.abc import Iterable

import torch

from tests.support_matrix.cells import (
    EXPERT_FEATURES,
    EXPERT_LAYOUTS,
    EXPERT_SCHEDULE_LAYOUTS,
    EXPERTS,
    FEATURES,
    LAYOUTS,
    MODEL,
    NAMED_SCHEDULES,
    ROWS,
    SCHEDULE_LAYOUTS,
    Cell,
    name_of,
)

Row = tuple[tuple[int, ...], int]
"""A layout and its expert-parallel degree; 0: the dense model."""


def _table(
    rows: Iterable[Row],
    columns: Iterable[str],
    kind: str,
    results: dict[Cell, str],
) -> str:
    """
    Args:
        kind: the field of a cell that a column stands for, `feature` or `schedule`.
    """
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(list(columns)) + 1) + "|"]
    for layout, ep in rows:
        texts = [results.get(Cell(layout, ep=ep, **{kind: column}), "") for column in columns]
        lines.append(f"| {name_of(layout, ep)} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def document(results: dict[Cell, str], notes: list[str]) -> str:
    """The support matrix in Markdown."""
    footnotes = "\n".join(f"- [{number}] refused: {note}" for number, note in enumerate(notes, 1))
    model = ", ".join(f"{name} {value}" for name, value in MODEL.items())
    experts = ", ".join(f"{name} {value}" for name, value in EXPERTS.items())
    return f"""# Support matrix

Generated from real runs by `python -m tests.support_matrix --output docs/reference/support-matrix.md`
(torch {torch.__version__}, gloo, CPU, {platform.machine()}). Do not edit.

Each cell is a run of a tiny Llama ({model}; 4 layers, 8 with pp 4)
on gloo ranks, in fp32, with {ROWS} rows of 32 tokens per step: 10 steps in the column "plain" and for the schedules,
4 elsewhere. It is compared with plain PyTorch on one process. The numbers are the largest relative difference of the
loss over all steps, and the largest difference within any parameter's gradient of the first step, relative to the
gradient's largest element. Gradients of later steps, gradient norm, token counts, the update of every weight in every
step and validation loss are within tolerance too ([what is compared](numerics.md#what-is-compared)).

A number in brackets refers to the message below that refuses the configuration before anything starts. A cell is empty
where the feature has no effect, and, for the columns from "AC selective op" to "Muon" and for "async TP", where three
axes combine: every pair of them is measured in another row.

## Layouts and features

{_table(_dense(LAYOUTS), FEATURES, "feature", results)}

Pipelines above use the schedule 1F1B. "optimizer in backward" runs without clipping. "compile" is inductor with
selective activation checkpointing by operation. "float8" is rowwise and "float8 all-gather" tensorwise; both are
emulated, and so is MXFP8, which runs on a wider model. These three have wider tolerances, and so have the updates of
Muon, which are computed in bf16.

## Pipeline schedules

{_table(_dense(SCHEDULE_LAYOUTS), NAMED_SCHEDULES, "schedule", results)}

## Mixture of experts

The same for a tiny Qwen3-MoE ({experts}), whose experts are balanced by a
routing bias, by auxiliary losses of each row and of the global batch, and by the router z-loss, all at once. `ep` is
`parallelism.expert_parallel_degree`, whose ranks are those of dp_shard, cp and tp. The routing biases are compared
too. "moved" counts tokens, at least, that were sent to another expert than on one process, over all steps and layers.
Most columns are measured on up to four ranks. In "float8" the products of experts are rounded too.

{_table(EXPERT_LAYOUTS, EXPERT_FEATURES, "feature", results)}

## Pipeline schedules with experts

{_table(EXPERT_SCHEDULE_LAYOUTS, NAMED_SCHEDULES[1:], "schedule", results)}

## Refused

{footnotes}
"""  # noqa: E501


def _dense(layouts: Iterable[tuple[int, ...]]) -> list[Row]:
    return [(layout, 0) for layout in layouts]


def read_document(text: str) -> tuple[dict[Cell, str], list[str]]:
    """Inverse of `document`: the cells' texts, and the refusals in order."""
    *tables, refusals = text.split("\n## ")[1:]
    results: dict[Cell, str] = {}
    for number, section in enumerate(tables):
        kind = ("feature", "schedule")[number % 2]
        lines = [
            [part.strip() for part in line.split("|")[1:-1]]
            for line in section.splitlines()
            if "|" in line
        ]
        columns = lines[0][1:]
        rows = {
            name_of(layout, ep): (layout, ep)
            for layout, ep in (EXPERT_LAYOUTS if number > 1 else _dense(LAYOUTS))
        }
        for name, *texts in lines[2:]:
            layout, ep = rows[name]
            results |= {
                Cell(layout, ep=ep, **{kind: c}): t
                for c, t in zip(columns, texts, strict=True)
                if t
            }
    return results, re.findall(r"- \[\d+\] refused: (.*)", refusals)
