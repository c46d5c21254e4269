"""The timeline of a pipeline schedule, and the activations it keeps.

The orders of computations are those that the trainer runs: this project's 1F1B, torch's for every other name, or those
of a CSV file.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

from torchtitan.config.schedule_file import Action, Step, execute, read_orders
from torchtitan.config.stages import PipelineStages


class Program:
    """The computations of each rank for one batch, in order, and what follows from the order alone."""

    def __init__(self, orders: Sequence[Sequence[Action]]):
        self.orders = tuple(map(tuple, orders))

    @cached_property
    def steps(self) -> list[Step]:
        """Every computation, after the one it waits for."""
        return execute(self.orders)

    @cached_property
    def kept(self) -> tuple[tuple[dict[int, int], ...], ...]:
        """For each rank, how many microbatches its stages keep at once (`{stage: number}`), at each moment that no
        other one exceeds in every stage."""
        return tuple(_most_kept(order) for order in self.orders)


@dataclass(frozen=True)
class Timeline:
    """When each rank computes what, in seconds from the start of the batch."""

    events: tuple[tuple[int, Action, float, float], ...]
    """(rank, computation, begin, end)."""
    busy: tuple[float, ...]
    """Seconds that each rank computes."""
    length: float

    @property
    def idle(self) -> float:
        """Share of the ranks' time that they wait for each other: the bubble."""
        return 1 - sum(self.busy) / (self.length * len(self.busy)) if self.length else 0.0


def program(stages: PipelineStages, microbatches: int) -> Program:
    """The schedule of `stages` for a batch of `microbatches`."""
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

        # A schedule only asks its stages for their place in the pipeline.
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
    """One of torch's actions as ours: none, one, or the two that it overlaps."""
    if entry is None:
        return []
    if entry.sub_actions:
        return [action for part in entry.sub_actions for action in _actions(part)]
    kind = {"BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B", "FORWARD": "F"}
    return [Action(entry.stage_index, kind[entry.computation_type.name], entry.microbatch_index)]


def simulate(program: Program, duration: Callable[[int, str], float], transfer: float) -> Timeline:
    """Time a schedule in which each rank starts every computation as soon as it can.

    Args:
        duration: seconds of a computation, by stage and kind (`F`, `B`, `I`, `W`).
        transfer: seconds to send the result of a computation to another rank.
    """
    seconds = cache(duration)
    clock, busy = [0.0] * len(program.orders), [0.0] * len(program.orders)
    events: list[tuple[int, Action, float, float]] = []
    for rank, action, source, remote in program.steps:
        begin = clock[rank]
        if source >= 0:
            begin = max(begin, events[source][3] + (transfer if remote else 0.0))
        took = seconds(action.stage, action.kind)
        busy[rank] += took
        clock[rank] = begin + took
        events.append((rank, action, begin, clock[rank]))
    return Timeline(tuple(events), tuple(busy), max(clock))


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
