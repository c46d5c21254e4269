"""Pipeline schedules on paper: the orders that the trainer runs, timed, and the activations they keep.

The orders are the real ones: this project's 1F1B, torch's own for every other name, or those of a CSV file.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

from torchtitan.config.schedule_file import Action, read_orders
from torchtitan.config.stages import PipelineStages


class Program:
    """The computations of each rank for one batch, in order, and what follows from the order alone."""

    def __init__(self, orders: Sequence[Sequence[Action]]):
        self.orders = tuple(map(tuple, orders))

    @cached_property
    def steps(self) -> list[tuple[int, Action, int, bool]]:
        """Every computation after all it waits for: (rank, computation, place in this list of what it takes its input
        from or -1, that is on another rank)."""
        last = max(action.stage for order in self.orders for action in order)
        done: dict[tuple[int, str, int], int] = {}
        out: list[tuple[int, Action, int, bool]] = []
        position = [0] * len(self.orders)
        while True:
            before = len(out)
            for rank, order in enumerate(self.orders):
                for action in order[position[rank] :]:
                    source = _source(action, last)
                    place = done.get((*source, action.microbatch)) if source else -1
                    if place is None:
                        break
                    if action.kind != "W":
                        done[action.stage, "F" if action.kind == "F" else "B", action.microbatch] = len(out)
                    out.append((rank, action, place, place >= 0 and out[place][0] != rank))
                    position[rank] += 1
            if len(out) == before:
                assert before == sum(map(len, self.orders)), "the schedule can't run"
                return out

    @cached_property
    def kept(self) -> tuple[tuple[dict[int, int], ...], ...]:
        """Of each rank the numbers of microbatches that its stages keep at a time, without those that are less than
        others in every stage."""
        return tuple(_most_kept(order) for order in self.orders)


@dataclass(frozen=True)
class Timeline:
    """When each rank computes what, in seconds since the first."""

    events: tuple[tuple[int, Action, float, float], ...]
    """(rank, computation, begin, end)."""
    busy: tuple[float, ...]
    """Seconds in which each rank computes."""
    length: float

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which they wait for others: the bubble."""
        return 1 - sum(self.busy) / (self.length * len(self.busy)) if self.length else 0.0


def program(stages: PipelineStages, microbatches: int) -> Program:
    """What the ranks of `stages` compute for one batch."""
    if stages.csv_file:
        return Program(read_orders(stages.csv_file, max(stages.ranks) + 1)[0])
    assert stages.schedule is not None
    return _named(stages.schedule, stages.ranks, microbatches)


@cache
def _named(schedule: str, owners: tuple[int, ...], microbatches: int) -> Program:
    degree, count = max(owners) + 1, range(microbatches)
    if schedule == "GPipe":
        return Program([[Action(r, kind, m) for kind in "FB" for m in count] for r in range(degree)])
    if schedule == "1F1B":
        from torchtitan.parallel.pipeline import one_forward_one_backward

        made = [one_forward_one_backward(r, degree, microbatches) for r in range(degree)]
    else:
        from torch.distributed.pipelining.schedules import get_schedule_class

        # A schedule asks its stages only where they stand.
        own = [stage for stage, rank in enumerate(owners) if rank == 0]
        places = [_place(stage, owners) for stage in own]
        made = list(get_schedule_class(schedule)(places, microbatches, scale_grads=False).pipeline_order.values())
    return Program([list(itertools.chain.from_iterable(map(_actions, order))) for order in made])


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


def simulate(plan: Program, duration: Callable[[int, str], float], transfer: float) -> Timeline:
    """Run `plan`, each rank as soon as it can.

    Args:
        duration: seconds of a stage's computation, by stage and kind (`F`, `B`, `I`, `W`).
        transfer: seconds from the end of a computation to its result being on another rank.
    """
    seconds = cache(duration)
    clock, busy = [0.0] * len(plan.orders), [0.0] * len(plan.orders)
    events: list[tuple[int, Action, float, float]] = []
    for rank, action, source, arrives in plan.steps:
        begin = clock[rank]
        if source >= 0:
            begin = max(begin, events[source][3] + (transfer if arrives else 0.0))
        took = seconds(action.stage, action.kind)
        busy[rank] += took
        clock[rank] = begin + took
        events.append((rank, action, begin, clock[rank]))
    return Timeline(tuple(events), tuple(busy), max(clock))


def _source(action: Action, last: int) -> tuple[int, str] | None:
    """Stage and kind of what `action` waits for, from another stage or from its own forward."""
    if action.kind == "F":
        return (action.stage - 1, "F") if action.stage else None
    if action.kind == "W":
        return action.stage, "B"
    return (action.stage + 1, "B") if action.stage < last else (action.stage, "F")


def _most_kept(order: tuple[Action, ...]) -> tuple[dict[int, int], ...]:
    now = dict.fromkeys(sorted({action.stage for action in order}), 0)
    seen = set()
    for action in order:
        if action.kind == "F":
            now[action.stage] += 1
            seen.add(tuple(now.values()))
        elif action.kind in "BW":
            now[action.stage] -= 1
    most = [a for a in seen if not any(b != a and all(x <= y for x, y in zip(a, b, strict=True)) for b in seen)]
    return tuple(dict(zip(now, counts, strict=True)) for counts in most)
