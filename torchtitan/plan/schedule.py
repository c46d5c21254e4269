"""Pipeline schedules on paper: the orders that the trainer runs, timed, and the activations they keep.

The orders are the real ones: this project's 1F1B, torch's own for every other name, or those of a CSV file.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from torchtitan.distributed.schedule_file import Action, read_orders
from torchtitan.distributed.stages import StagePlan

Orders = tuple[tuple[Action, ...], ...]
"""The computations of each rank."""


@dataclass(frozen=True)
class Timeline:
    """When each rank computes what, in seconds since the first."""

    events: tuple[tuple[tuple[Action, float, float], ...], ...]
    """Of each rank: (computation, begin, end)."""
    length: float

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which they wait for others: the bubble."""
        busy = sum(end - begin for rank in self.events for _, begin, end in rank)
        return 1 - busy / (self.length * len(self.events)) if self.length else 0.0


def orders_of(stages: StagePlan, microbatches: int) -> Orders:
    """The computations of each rank of `stages` for one batch."""
    degree = max(stages.ranks) + 1
    if stages.csv_file:
        return tuple(tuple(order) for order in read_orders(stages.csv_file, degree)[0])
    assert stages.schedule is not None
    return _named(stages.schedule, stages.ranks, microbatches)


@cache
def _named(schedule: str, owners: tuple[int, ...], microbatches: int) -> Orders:
    degree, count = max(owners) + 1, range(microbatches)
    if schedule == "GPipe":
        return tuple(tuple(Action(r, kind, m) for kind in "FB" for m in count) for r in range(degree))
    if schedule == "1F1B":
        from torchtitan.distributed.pipeline import one_forward_one_backward

        made = [one_forward_one_backward(r, degree, microbatches) for r in range(degree)]
    else:
        from torch.distributed.pipelining.schedules import get_schedule_class

        # A schedule asks its stages only where they stand.
        own = [stage for stage, rank in enumerate(owners) if rank == 0]
        places = [_place(stage, owners) for stage in own]
        made = list(get_schedule_class(schedule)(places, microbatches, scale_grads=False).pipeline_order.values())
    return tuple(tuple(itertools.chain.from_iterable(map(_actions, order))) for order in made)


def _place(stage: int, owners: tuple[int, ...]) -> Any:
    from torch import nn

    group = {"group": None, "group_rank": 0, "group_size": max(owners) + 1, "device": "cpu"}
    module = {"submod": nn.Identity(), "has_backward": False}
    ends = {"is_first": stage == 0, "is_last": stage == len(owners) - 1}
    return SimpleNamespace(stage_index=stage, num_stages=len(owners), **ends, **group, **module)


def _actions(entry: Any) -> list[Action]:
    """Ours for one of torch's, which may be none, or two at the same time."""
    if entry is None:
        return []
    if entry.sub_actions:
        return [action for part in entry.sub_actions for action in _actions(part)]
    kind = {"BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B", "FORWARD": "F"}
    return [Action(entry.stage_index, kind[entry.computation_type.name], entry.microbatch_index)]


def simulate(orders: Orders, duration: Callable[[int, str], float], transfer: float) -> Timeline:
    """Run `orders`, each rank as soon as it can.

    Args:
        duration: seconds of a stage's computation, by stage and kind (`F`, `B`, `I`, `W`).
        transfer: seconds from the end of a computation to its result being on another rank.
    """
    last = max(action.stage for order in orders for action in order)
    owner = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    seconds = {key: duration(*key) for key in {(a.stage, a.kind) for order in orders for a in order}}
    done: dict[tuple[int, str, int], float] = {}
    events: list[list[tuple[Action, float, float]]] = [[] for _ in orders]
    clock, position = [0.0] * len(orders), [0] * len(orders)
    waiting = list(range(len(orders)))
    while waiting:
        moved = False
        for rank in waiting:
            while position[rank] < len(orders[rank]):
                a = orders[rank][position[rank]]
                source = _source(a, last)
                key = source and (source[0], source[1], a.microbatch)
                if key and key not in done:
                    break
                ready = done[key] + (transfer if owner[key[0]] != rank else 0.0) if key else 0.0
                begin = max(clock[rank], ready)
                clock[rank] = begin + seconds[a.stage, a.kind]
                if a.kind != "W":
                    done[a.stage, "F" if a.kind == "F" else "B", a.microbatch] = clock[rank]
                events[rank].append((a, begin, clock[rank]))
                position[rank] += 1
                moved = True
        waiting = [rank for rank in waiting if position[rank] < len(orders[rank])]
        assert moved or not waiting, "the schedule can't run"
    return Timeline(tuple(map(tuple, events)), max(clock))


def _source(action: Action, last: int) -> tuple[int, str] | None:
    """Stage and kind of what `action` waits for, from another stage or from its own forward."""
    if action.kind == "F":
        return (action.stage - 1, "F") if action.stage else None
    if action.kind == "W":
        return action.stage, "B"
    return (action.stage + 1, "B") if action.stage < last else (action.stage, "F")


def most_in_flight(order: tuple[Action, ...], size: Callable[[int], float]) -> float:
    """The most that the forwards of one rank keep at a time for backwards to come.

    Args:
        size: of what one microbatch keeps on a stage.
    """
    now = most = 0.0
    for action in order:
        if action.kind == "F":
            now += size(action.stage)
        elif action.kind in "BW":
            now -= size(action.stage)
        most = max(most, now)
    return most
