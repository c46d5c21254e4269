"""The timeline of a pipeline schedule: for its picture, and for a schedule from a file.

The trainer runs the same orders of computations: this project's 1F1B, torch's for every other
name, or a CSV file's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

from torchtitan.parallel.pipeline.schedules import Action, ScheduledAction, execute
from torchtitan.parallel.pipeline.split import PipelinePlan


class Program:
    """Each rank's computations for one batch, in order, and their dependencies."""

    def __init__(self, orders: Sequence[Sequence[Action]], ranks: Sequence[int]):
        """
        Args:
            orders: of each rank, with communication (`RECV_F`, `SEND_B`, ...).
            ranks: of each stage.
        """
        self.ranks = ranks
        self.orders_with_transfers = orders
        self.orders = tuple(
            tuple(action for action in order if action.kind in "FBIW") for order in orders
        )

    @cached_property
    def steps(self) -> list[ScheduledAction]:
        """Every computation, after the one it waits for."""
        return execute([[(action,) for action in order] for order in self.orders])


@dataclass(frozen=True)
class Timeline:
    """Each rank's computations, in seconds from the start of the batch."""

    events: tuple[tuple[int, Action, float, float], ...]
    """(rank, computation, begin, end)."""
    busy: tuple[float, ...]
    """Seconds that each rank computes."""
    length: float


def program(stages: PipelinePlan, microbatches: int) -> Program:
    """The schedule of `stages` for a batch of `microbatches`."""
    return _program(stages.schedule, stages.csv_file, stages.ranks, microbatches)


@cache
def _program(
    name: str | None, csv_file: str | None, ranks: tuple[int, ...], microbatches: int
) -> Program:
    from torchtitan.parallel.pipeline.pipeline import build_schedule

    # A schedule only asks its stages for their place in the pipeline.
    stages = [_stage_stub(stage, ranks) for stage, rank in enumerate(ranks) if rank == 0]
    orders = build_schedule(name, csv_file, stages, microbatches).pipeline_order_with_comms
    return Program(
        [
            [action for entry in orders[rank] for action in _actions(entry)]
            for rank in sorted(orders)
        ],
        ranks,
    )


def _stage_stub(stage: int, ranks: tuple[int, ...]) -> Any:
    from torch import nn

    group = {"group": None, "group_rank": 0, "group_size": max(ranks) + 1, "device": "cpu"}
    module = {"submod": nn.Identity(), "has_backward": False}
    ends = {"is_first": stage == 0, "is_last": stage == len(ranks) - 1}
    return SimpleNamespace(stage_index=stage, num_stages=len(ranks), **ends, **group, **module)


_KINDS = {"BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B", "FORWARD": "F"}


def _actions(entry: Any) -> list[Action]:
    """One of torch's actions as ours: one, or the two that it overlaps; none for FSDP's."""
    if entry.sub_actions:
        return [action for sub_action in entry.sub_actions for action in _actions(sub_action)]
    if entry.microbatch_index is None:
        return []
    kind = entry.computation_type.name
    return [Action(entry.stage_index, _KINDS.get(kind, kind), entry.microbatch_index)]


def simulate(program: Program, duration: Callable[[int, str], float], transfer: float) -> Timeline:
    """Time a schedule in which each rank starts every computation as soon as it can.

    Args:
        duration: seconds of a computation, by stage and kind (`F`, `B`, `I`, `W`).
        transfer: seconds to send the result of a computation to another rank.
    """
    seconds = cache(partial(_seconds, duration))
    clock = [0.0] * len(program.orders)
    busy = [0.0] * len(program.orders)
    events: list[tuple[int, Action, float, float]] = []
    for rank, action, source, remote in program.steps:
        begin = clock[rank]
        if source >= 0:
            begin = max(begin, events[source][3] + (transfer if remote else 0.0))
        length = seconds(action.stage, action.kind)
        busy[rank] += length
        clock[rank] = begin + length
        events.append((rank, action, begin, clock[rank]))
    return Timeline(tuple(events), tuple(busy), max(clock))


def _seconds(duration: Callable[[int, str], float], stage: int, kind: str) -> float:
    """No stage waits for the gradients of the first one's inputs: of a split backward, torch runs
    all in `W`.
    """
    if stage > 0 or kind in "FB":
        return duration(stage, kind)
    return duration(stage, "B") if kind == "W" else 0.0
