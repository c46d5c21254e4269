"""Pipeline schedules that torch doesn't have, as orders of computations to write to a CSV file.
Imports no torch.

All split the backward into the gradients of inputs (`I`), which the stage before waits for, and
those of weights (`W`), which nothing waits for. ZB-H1 is 1F1B with each `W` postponed into the
bubble (Qi et al., arXiv:2401.10241). V-Min and V-Half (Qi et al., arXiv:2405.15362) put two stages
on each rank in a V: stage 0 on rank 0 to p - 1 on rank p - 1, then p on rank p - 1 back to 2p - 1
on rank 0. A microbatch that a rank keeps for long at one stage it then keeps shortly at the other,
so all ranks keep equally much, and less of it the faster a microbatch hops from rank to rank.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from torchtitan.parallel.pipeline_csv import Action, execute, waits_for

Orders = list[list[Action]]
"""The computations of each rank, in order."""

HOPS = {"v-min": (1, 1), "v-half": (2, 1)}
"""Time between the same pass on neighbouring ranks, by schedule: on the way down the V,
forwards of its first half and backwards of its second; and on the way up. Times are in passes: F, I
and W of a stage are taken to be equally long. Memory goes by the sum: 2 keeps a third of 1F1B's
activations, 3 a half (and 6 all, without a bubble: torch's ZBV).
"""
NAMES = ("zb-h1", *HOPS)
PERIOD = 6
"""Passes of a rank per microbatch: F, I and W of two stages."""


def orders_of(name: str, degree: int, microbatches: int) -> Orders:
    """The schedule `name` on `degree` ranks, 2 or more."""
    if name == "zb-h1":
        orders = [_zb_h1(rank, degree, microbatches) for rank in range(degree)]
    else:
        orders = _v_shaped(degree, microbatches, *HOPS[name])
    return [[*_whole_on_first_stage(orders[0])], *orders[1:]]


def as_csv(orders: Sequence[Sequence[Action]]) -> str:
    """The file for `parallelism.pipeline_parallel_schedule_csv`: a row per rank."""
    return "".join(f"{','.join(map(str, order))}\n" for order in orders)


def most_kept(orders: Sequence[Sequence[Action]]) -> int:
    """Microbatches between forward and last backward, counted once per stage, on the rank with the
    most.
    """
    changes = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(
        max(itertools.accumulate(changes[action.kind] for action in order)) for order in orders
    )


def _whole_on_first_stage(order: Sequence[Action]) -> Iterator[Action]:
    """No stage waits for the first one's backward, so splitting it gains nothing."""
    for action in order:
        if action.stage > 0 or action.kind == "F":
            yield action
        elif action.kind == "I":
            yield Action(0, "B", action.microbatch)


def _zb_h1(rank: int, degree: int, microbatches: int) -> list[Action]:
    """1F1B whose ranks keep as many microbatches as the first: a rank that forwards fewer ahead
    postpones more `W`.
    """
    ahead = min(microbatches, degree - rank)
    order = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(Action(rank, "I", m))
        order += [Action(rank, "W", m - rank)] * (m >= rank)
        order += [Action(rank, "F", ahead + m)] * (ahead + m < microbatches)
    return order + [Action(rank, "W", m) for m in range(max(0, microbatches - rank), microbatches)]


# ---- V-shaped: the passes of one microbatch make a pattern, which repeats every `PERIOD` for the
# next


Pattern = list[list[tuple[int, str, int]]]
"""The passes of the first microbatch on each rank: stage, kind, and when they start."""


def _v_shaped(degree: int, microbatches: int, down: int, up: int) -> Orders:
    """The pattern with these hops that keeps least; the fastest among equals."""
    waits = range(PERIOD)
    found = [_pattern(degree, down, up, turns) for turns in itertools.product(waits, waits, waits)]
    patterns = [pattern for pattern in found if pattern]
    enough = min(microbatches, 2 * degree)  # by then, as many are kept as ever

    def cost(pattern: Pattern) -> tuple[int, int]:
        orders = _repeated(pattern, enough)
        return most_kept(orders), _length(orders)

    return _inputs_first(_repeated(min(patterns, key=cost), microbatches))


def _pattern(degree: int, down: int, up: int, turns: tuple[int, int, int]) -> Pattern | None:
    """The passes of one microbatch, or None if they and their repetitions would overlap on some
    rank.

    Args:
        turns: how long it waits at each turn: at the V's bottom, at its end, and at the bottom on
        the way back.
    """
    climb = 1 + turns[0] + down * (degree - 1)
    back = climb + 1 + turns[1] + up * (degree - 1)
    home = back + 1 + turns[2] + down * (degree - 1)
    pattern = []
    for rank in range(degree):
        first = rank
        second = 2 * degree - 1 - rank
        above = degree - 1 - rank
        passes = [
            (first, "F", down * rank),
            (second, "F", climb + up * above),
            (second, "I", back + down * rank),
            (first, "I", home + up * above),
        ]
        taken = {start % PERIOD for _, _, start in passes}
        if len(taken) < len(passes):
            return None
        for stage, _, start in passes[2:]:
            free = next(time for time in itertools.count(start + 1) if time % PERIOD not in taken)
            taken.add(free % PERIOD)
            passes.append((stage, "W", free))
        pattern.append(passes)
    return pattern


def _repeated(pattern: Pattern, microbatches: int) -> Orders:
    """Each rank's passes in the order of the pattern. When they run, gaps close, since a pass
    starts when it can.
    """
    orders = []
    for passes in pattern:
        timed = [
            (start + PERIOD * m, Action(stage, kind, m))
            for m in range(microbatches)
            for stage, kind, start in passes
        ]
        orders.append([action for _, action in sorted(timed, key=lambda entry: entry[0])])
    return orders


def _length(orders: Orders) -> int:
    """Passes from the first to the last, if all are equally long."""
    clock = [0] * len(orders)
    ends = list[int]()
    for rank, _, source, _ in execute(orders):
        clock[rank] = max(clock[rank], ends[source] if source >= 0 else 0) + 1
        ends.append(clock[rank])
    return max(clock)


def _inputs_first(orders: Orders) -> Orders:
    """After a rank's last forward, let no `W` delay an `I`: nothing more is kept, and other ranks
    wait for `I`.
    """
    last_stage = max(action.stage for order in orders for action in order)
    cuts = [max(i for i, action in enumerate(order) if action.kind == "F") + 1 for order in orders]
    until = [deque(order[:cut]) for order, cut in zip(orders, cuts, strict=True)]
    after = [
        sorted(order[cut:], key=lambda action: action.kind)
        for order, cut in zip(orders, cuts, strict=True)
    ]
    done: set[tuple[int, str, int]] = set()
    made: Orders = [[] for _ in orders]

    def can_run(action: Action) -> bool:
        needed = waits_for(action, last_stage)
        return needed is None or (*needed, action.microbatch) in done

    while any(until) or any(after):  # every rank runs a pass, or waits
        ran = []
        for rank, order in enumerate(made):
            action = next(
                filter(can_run, itertools.islice(until[rank], 1) if until[rank] else after[rank]),
                None,
            )
            if action:
                (until[rank] or after[rank]).remove(action)
                order.append(action)
                ran.append(action)
        done |= {
            (a.stage, "F" if a.kind == "F" else "B", a.microbatch) for a in ran if a.kind != "W"
        }
    return made
