"""Compare planned pipeline schedules with published ones.

    python benchmarks/published/plan_schedules.py

`published_schedules.csv` holds one model under six schedules, measured with another system: Primus,
on Megatron. So only what follows from the schedule is compared: throughput relative to 1F1B, and
how memory changes with the schedule.

What is taken over, for all rows alike:
- The page names Llama 2 7B, but FLOP/s over tokens/s is 23.44 GFLOP per token: 16 of its 32 layers
at 4,096 tokens.
- The number of microbatches is not given. 32 is the power of two that meets the table best (see
`MICROBATCHES`).
- Hidden states pass between neighbours over one of MI300X's seven links, 64 GB/s by its data sheet.
Nothing else is
  sent, as there are no other axes than `pp`.
- Blocks run eagerly, so that splitting a backward costs nothing.
- Megatron's state and activations have other sizes than ours. Memory is `state` bytes per parameter
and `kept` per
  layer and microbatch in flight, both solved from the rows marked `fit`, plus logits; the other
  four rows are held out. So they test the count of what each schedule keeps, which is the
  planner's. Megatron's backward of inputs releases as much as it adds, unlike torch's, whose plans
  are in the last column.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan.config import resolve
from torchtitan.optim.loss import LOGIT_BYTES
from torchtitan.tools.planner.costs import step_time
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.planner.memory import GIB, predict_memory
from torchtitan.tools.planner.pipeline_costs import in_flight
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.preflight import preflight

FILE = Path(__file__).with_name("published_schedules.csv")
MICROBATCHES = 32
"""Also those of the files in `schedules/`, whose schedules torch lacks."""
LLAMA_2 = {"n_kv_heads": 32, "ffn_dim": 11008, "vocab_size": 32000, "rope_theta": 10000.0}


@dataclass(frozen=True)
class Row:
    """One published schedule, and its plan."""

    schedule: str
    fit: bool
    """Memory: one of the rows from which the two sizes are solved."""
    published: float
    """Throughput relative to 1F1B."""
    planned: float
    published_gib: float
    planned_gib: float
    """Of the published system."""
    here_gib: float
    """Of this project's trainer: whole weights and gradients in fp32, and torch's split backward.
    """


def workload(row: dict[str, str]) -> Workload:
    """A row's settings as a configuration of this project."""
    degree = int(row["pp"])
    settings = {
        "model.flavor": "8B",
        "model.overrides.n_layers": row["layers"],
        **{f"model.overrides.{key}": value for key, value in LLAMA_2.items()},
        "parallelism.pipeline_parallel_degree": degree,
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        "training.seq_len": row["seq"],
        "training.local_batch_size": MICROBATCHES,
        "activation_checkpoint.mode": "none",
        "compile.enable": "false",
    }
    file = FILE.parent / "schedules" / f"{row['schedule']}.csv"
    if file.exists():
        settings["parallelism.pipeline_parallel_schedule_csv"] = file
    else:
        settings["parallelism.pipeline_parallel_schedule"] = row["schedule"]
    config = resolve(
        [f"--{key}={value}" for key, value in settings.items()], int(row["gpus"])
    ).config
    setup = preflight(config, output=False)
    return Workload(config, setup.args, setup.stages)


def counts(w: Workload) -> list[tuple[float, float, float]]:
    """Of each pipeline rank: parameters, most layers x microbatches in flight, and bytes of logits
    in its loss.
    """
    assert w.pipeline is not None
    out = []
    for rank in range(w.pp):
        stages = w.stages_of(rank)
        kept = max(
            sum(w.stages[stage].layers * count for stage, count in held.microbatches.items())
            for held in in_flight(w.pipeline, w.microbatches, rank)
        )
        logits = (
            LOGIT_BYTES["compiled"] * w.tokens * w.vocab * any(stage.has_output for stage in stages)
        )
        out.append((sum(map(w.params, stages)), kept, logits))
    return out


def rows(file: Path = FILE) -> list[Row]:
    """Every published row with its plan."""
    published = list(csv.DictReader(file.open()))
    hw = find_hardware("mi300x")
    loads = [workload(row) for row in published]
    counted = [counts(w) for w in loads]
    speeds = [step_time(w, hw).tokens_per_second for w in loads]
    here = [predict_memory(w).reserved / GIB for w in loads]
    # The rank that keeps most, without the loss, decides both fitted rows.
    fitted = [i for i, row in enumerate(published) if row["fit"]]
    first = np.array([counted[i][0][:2] for i in fitted])
    state, kept = np.linalg.solve(first, [float(published[i]["mem_gib"]) for i in fitted])
    return [
        Row(
            row["schedule"],
            bool(row["fit"]),
            float(row["relative"]),
            speed / speeds[0],
            float(row["mem_gib"]),
            max(state * params + kept * layers + logits / GIB for params, layers, logits in ranks),
            gib,
        )
        for row, ranks, speed, gib in zip(published, counted, speeds, here, strict=True)
    ]


def table() -> Iterator[str]:
    """Every row with its errors, as Markdown."""
    yield (
        "| schedule | speed, published | planned | error | GiB, published | planned | error "
        "| GiB here, planned |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows():
        speed = row.planned / row.published - 1
        space = row.planned_gib / row.published_gib - 1
        cells = [row.schedule, f"{row.published:.2f}", f"{row.planned:.2f}", f"{speed:+.1%}"]
        cells += [
            f"{row.published_gib:.1f}",
            f"{row.planned_gib:.1f}",
            "fit" if row.fit else f"{space:+.1%}",
        ]
        yield f"| {' | '.join([*cells, f'{row.here_gib:.1f}'])} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
