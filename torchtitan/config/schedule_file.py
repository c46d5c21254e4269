"""Pipeline schedules from a CSV file: read, and run through on paper before anything runs them. Imports no torch.

A row lists the computations of one rank in order, for example `0F0,0F1,0B0,0B1`: stage, kind, microbatch. The format is
the one that `torch.distributed.pipelining` reads and writes, without communication.
"""

import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Action:
    """One entry of a schedule: a forward `F`, backward `B`, or backward for inputs `I` or weights `W` only."""

    stage: int
    kind: str
    microbatch: int


_TOKEN = re.compile(r"(\d+)([FBIW])(\d+)")


def read_orders(path: str, degree: int) -> tuple[list[list[Action]], list[str]]:
    """The computations of each rank, one row a rank; `(0F1;3B0)OVERLAP_F_B` counts as its two parts.

    And what is wrong with the file.
    """
    key = "parallelism.pipeline_parallel_schedule_csv"
    try:
        rows = list(csv.reader(Path(path).read_text().splitlines()))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        return [], [f"{key}: can't read {path!r}: {getattr(error, 'strerror', None) or error}"]
    problems, orders = [], []
    for number, row in enumerate(rows, 1):
        order = []
        for cell in (cell.strip() for cell in row):
            parts = cell.removesuffix("OVERLAP_F_B").strip("()").split(";") if cell else []
            matches = [_TOKEN.fullmatch(part.strip()) for part in parts]
            if not all(matches):
                problems.append(f"{key}: {path}:{number}: {cell!r} is no computation; write stage, F, B, I or W, and "
                                "microbatch, as 0F3, without communication")  # fmt: skip
                break
            order += [Action(int(m[1]), m[2], int(m[3])) for m in matches if m]
        if not order and not problems:
            problems.append(f"{key}: {path}:{number}: rank {number - 1} computes nothing; every rank needs a stage")
        orders.append(order)
    if len(rows) != degree:
        problems.append(
            f"{key}: {path} has {len(rows)} rows, one per rank, but parallelism.pipeline_parallel_degree is {degree}"
        )
    return orders, problems


def order_problems(path: str, orders: list[list[Action]], stages: int) -> Iterator[str]:
    """Why the schedule would compute something wrong, or stop: found by running it."""
    key = f"parallelism.pipeline_parallel_schedule_csv: {path}"
    microbatches = {action.microbatch for order in orders for action in order}
    owner: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if owner.setdefault(action.stage, rank) != rank:
                yield f"{key}: stage {action.stage} is on ranks {owner[action.stage]} and {rank}"
                return
    counts = {(a.stage, a.kind, a.microbatch): 0 for order in orders for a in order}
    for order in orders:
        for a in order:
            counts[a.stage, a.kind, a.microbatch] += 1
    for stage, microbatch in itertools.product(range(stages), sorted(microbatches)):
        kinds = "".join(kind * counts.get((stage, kind, microbatch), 0) for kind in "FBIW")
        if kinds not in ("FB", "FIW"):
            found = f"stage {stage}, microbatch {microbatch} has {kinds or 'nothing'}"
            yield f"{key}: {found}; it needs F and B, or F, I and W"
            return
    forwards = [a.microbatch for a in orders[owner[stages - 1]] if a.stage == stages - 1 and a.kind == "F"]
    if forwards != list(range(len(microbatches))):
        yield f"{key}: the last stage must run the forwards of its microbatches in the order 0, 1, 2, ..."
        return
    done: set[Action] = set()
    left = [list(order) for order in orders]
    while any(left):
        ready = [order for order in left if order and _inputs(order[0], stages, done)]
        if not ready:
            rank = next(rank for rank, order in enumerate(left) if order)
            a = left[rank][0]
            yield f"{key}: can never run {a.stage}{a.kind}{a.microbatch} of rank {rank}: what it waits for comes later"
            return
        for order in ready:
            done.add(order.pop(0))


def _inputs(action: Action, stages: int, done: set[Action]) -> bool:
    """Whether all that `action` depends on is done."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return stage == 0 or Action(stage - 1, "F", microbatch) in done
    if action.kind == "W":
        return Action(stage, "I", microbatch) in done
    above = stage == stages - 1 or any(Action(stage + 1, kind, microbatch) in done for kind in "BI")
    return above and Action(stage, "F", microbatch) in done
