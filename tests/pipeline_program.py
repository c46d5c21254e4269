"""The order of computations that the trainer runs: this project's 1F1B, torch's for every other
name, or a CSV file's. The planner's formulas are held to it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import nn

from torchtitan.parallel.pipeline.pipeline import build_schedule
from torchtitan.parallel.pipeline.schedules import Action
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.tools.planner.pipeline_costs import BatchTime, execution_time

KINDS = {"BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B", "FORWARD": "F"}


class Program:
    """Each rank's computations for one batch, in order."""

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


def program(stages: PipelinePlan, microbatches: int) -> Program:
    """The schedule of `stages` for a batch of `microbatches`."""
    return _program(stages.schedule, stages.csv_file, stages.ranks, microbatches)


@cache
def _program(
    name: str | None, csv_file: str | None, ranks: tuple[int, ...], microbatches: int
) -> Program:
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
    group = {"group": None, "group_rank": 0, "group_size": max(ranks) + 1, "device": "cpu"}
    module = {"submod": nn.Identity(), "has_backward": False}
    ends = {"is_first": stage == 0, "is_last": stage == len(ranks) - 1}
    return SimpleNamespace(stage_index=stage, num_stages=len(ranks), **ends, **group, **module)


def _actions(entry: Any) -> list[Action]:
    """One of torch's actions as ours: one, or the two that it overlaps; none for FSDP's."""
    if entry.sub_actions:
        return [action for sub_action in entry.sub_actions for action in _actions(sub_action)]
    if entry.microbatch_index is None:
        return []
    kind = entry.computation_type.name
    return [Action(entry.stage_index, KINDS.get(kind, kind), entry.microbatch_index)]


def simulate(program: Program, duration: Callable[[int, str], float], transfer: float) -> BatchTime:
    orders = [[(action,) for action in order] for order in program.orders]
    return execution_time(orders, duration, transfer)
