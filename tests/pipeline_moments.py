"""What a pipeline rank holds at each moment of a schedule, by the order that the trainer runs.

It is the reference of the planner's formulas.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tests.pipeline_program import Program
from torchtitan.parallel.pipeline.schedules import Action


class Held(NamedTuple):
    """What a rank holds at a moment."""

    microbatches: dict[int, int]
    """Microbatches by stage that wait for their backward, or the rest of it."""
    transfers: int
    """Hidden states and gradients that have arrived, or may arrive, for a later computation, or are
    being sent.
    """
    postponed: Mapping[int, int] = MappingProxyType({})
    """Microbatches by stage that wait for their weights' backward only."""


def held(program: Program) -> tuple[tuple[Held, ...], ...]:
    """What each rank holds at those computations that can need the most memory."""
    return tuple(_most(holds(program, rank)) for rank in range(len(program.orders)))


def holds(program: Program, rank: int) -> Iterator[Held]:
    """What a rank holds at each of its computations, in order."""
    return _holds(program.orders_with_transfers[rank], program.ranks)


def _holds(order: Sequence[Action], ranks: Sequence[int]) -> Iterator[Held]:
    kept = dict.fromkeys(sorted({action.stage for action in order}), 0)
    arriving: dict[tuple[str, int, int], tuple[int, int]] = {}
    """(direction, stage, microbatch) of a posted receive to its rank and time."""
    sent: defaultdict[int, deque[int]] = defaultdict(deque)
    """Times of the gradients under way to each rank (`parallel/pipeline/stage.py`).
    Hidden states that are sent wait for their backward as well, so they are counted there.
    """
    postponed: Counter[int] = Counter()
    for time, action in enumerate(order):
        stage = action.stage
        kind = action.kind
        microbatch = action.microbatch
        if kind in ("RECV_F", "RECV_B"):
            arriving[kind, stage, microbatch] = (
                ranks[stage - 1 if kind == "RECV_F" else stage + 1],
                time,
            )
        elif kind == "SEND_B":
            sent[ranks[stage - 1]].append(time)
        elif kind in ("F", "B", "I", "W"):
            what = "RECV_F" if kind == "F" else "RECV_B", stage, microbatch
            sender, posted = arriving.get(what, (-1, -1))
            while sent[sender] and sent[sender][0] < posted:
                sent[sender].popleft()
            if kind == "F":
                kept[stage] += 1
                arriving.pop(what, None)
            yield Held(dict(kept), len(arriving) + sum(map(len, sent.values())), dict(+postponed))
            if stage and kind in "IW":
                postponed[stage] += 1 if kind == "I" else -1
            # A residual stream hands its gradient to its last product: weights need it too.
            if kind in "BW":
                kept[stage] -= 1
                arriving.pop(what, None)


def _most(moments: Iterable[Held]) -> tuple[Held, ...]:
    """Maximal moments: a microbatch keeps a stage's output or more, a transfer is as large."""
    front: dict[tuple[int, ...], Held] = {}
    for held in moments:
        postponed = (held.postponed.get(stage, 0) for stage in held.microbatches)
        counts = (
            *held.microbatches.values(),
            *postponed,
            held.transfers + sum(held.microbatches.values()),
        )
        if not any(all(x <= y for x, y in zip(counts, other, strict=True)) for other in front):
            front = {
                other: value
                for other, value in front.items()
                if any(x > y for x, y in zip(other, counts, strict=True))
            }
            front[counts] = held
    return tuple(front.values())
