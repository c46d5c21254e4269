"""The pipeline schedules, one table for the rules, the runtime and the planner. Imports no torch.

In `parallel/pipeline`, `pipeline.py` turns a name into torch's class, `split.py` assigns stages to
ranks, and `schedules.py` reads and checks a schedule from a file.
"""

from dataclasses import dataclass
from typing import Literal

from torchtitan.config.sections.parallelism import Parallelism


@dataclass(frozen=True)
class Schedule:
    """A schedule: the class that orders its computations, and what it requires of a run."""

    torch_class: str | None
    """Name in `torch.distributed.pipelining.schedules`. None: the order is in
    `parallel/pipeline/pipeline.py`, or in a file.
    """
    stages_per_rank: Literal["one", "several", "two in a V"]
    microbatches: Literal["any", "whole rounds", "one per stage"] = "any"
    """Legal numbers of microbatches n on p ranks: whole rounds are n // p of equal size; one per
    stage is at least as many as there are stages.
    """
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are separate computations."""

    @property
    def v_shaped(self) -> bool:
        """The second half of the stages returns from the last rank to the first."""
        return self.stages_per_rank == "two in a V"

    @property
    def default_stages(self) -> int:
        """Stages per rank, unless the configuration sets another number."""
        return 1 if self.stages_per_rank == "one" else 2


_INTERLEAVED = Schedule("ScheduleInterleaved1F1B", "several", "whole rounds")

SCHEDULES = {
    "GPipe": Schedule("ScheduleLoopedBFS", "one"),
    "1F1B": Schedule(None, "one", "one per stage"),
    "Interleaved1F1B": _INTERLEAVED,
    "FlexibleInterleaved1F1B": _INTERLEAVED,
    "LoopedBFS": Schedule("ScheduleLoopedBFS", "several"),
    "InterleavedZeroBubble": Schedule(
        "ScheduleInterleavedZeroBubble", "several", "whole rounds", splits_backward=True
    ),
    "ZBVZeroBubble": Schedule("ScheduleZBVZeroBubble", "two in a V", splits_backward=True),
    "DualPipeV": Schedule("ScheduleDualPipeV", "two in a V", "one per stage", splits_backward=True),
    # Base classes in torch, and placeholders here: they run the order of a file.
    "PipelineScheduleSingle": Schedule(None, "one"),
    "PipelineScheduleMulti": Schedule(None, "several"),
}
"""Schedules by their name in the configuration. torch merged FlexibleInterleaved1F1B into
Interleaved1F1B; GPipe is breadth-first with one stage per rank.
"""
NAMED_SCHEDULES = tuple(name for name in SCHEDULES if not name.startswith("PipelineSchedule"))
"""Names that need no file."""


def schedule_of(parallelism: Parallelism) -> Schedule:
    """The schedule of this name. A file takes precedence."""
    return SCHEDULES[parallelism.pipeline_parallel_schedule]


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the pipeline runs, or may run, the backward of inputs and of weights separately."""
    if parallelism.pipeline_parallel_degree == 1:
        return False
    from_file = bool(parallelism.pipeline_parallel_schedule_csv)
    return from_file or schedule_of(parallelism).splits_backward


@dataclass(frozen=True)
class FileSchedule:
    """Requirements of a schedule from a file."""

    ranks: tuple[int, ...]
    """Each stage's rank along `pp`."""
    microbatches: int
