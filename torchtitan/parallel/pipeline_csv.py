"""Pipeline schedules: the computations of each rank in order, read from a CSV file and executed
without computing.

A row of the file lists one rank's computations, for example `0F0,0F1,0B0,0B1`: stage, kind,
microbatch. It is the format of `torch.distributed.pipelining`, without communication. Imports no
torch.
"""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.files import read_regular
from torchtitan.utils.limits import PIPELINE_SCHEDULE_BYTES
from torchtitan.utils.text import brief


@dataclass(frozen=True)
class Action:
    """A computation: forward `F`, backward `B`, or its halves for inputs `I` and weights `W`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_TOKEN = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_KEY = "parallelism.pipeline_parallel_schedule_csv"


def schedule_file(config: Config) -> list[list[Action]] | None:
    """Each rank's computations in the file that the configuration names; None if it names none.

    Raises:
        ConfigError: what is wrong with the file.
    """
    p = config.parallelism
    path = p.pipeline_parallel_schedule_csv
    if not path or p.pipeline_parallel_degree == 1:
        return None
    orders, problems = read_orders(path, p.pipeline_parallel_degree)
    if not problems:
        stages = max(action.stage for order in orders for action in order) + 1
        problems += order_problems(path, orders, stages)
    if problems:
        raise ConfigError(problems)
    return orders


def read_orders(path: str, degree: int) -> tuple[list[list[Action]], list[str]]:
    """The computations of each of `degree` ranks, one row per rank, and what is wrong with the
    file.

    `(0F1;3B0)OVERLAP_F_B` counts as its two parts.
    """
    try:
        text = read_regular(Path(path), PIPELINE_SCHEDULE_BYTES, links=True).decode()
        rows = list(csv.reader(text.splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        return [], [f"{_KEY}: can't read {path!r}: {getattr(error, 'strerror', None) or error}"]
    problems: list[str] = []
    orders = []
    for number, row in enumerate(rows, 1):
        order = []
        for cell in (cell.strip() for cell in row):
            parts = cell.removesuffix("OVERLAP_F_B").strip("()").split(";") if cell else []
            matches = [_TOKEN.fullmatch(part.strip()) for part in parts]
            if not all(matches):
                problems.append(
                    f"{_KEY}: {path}:{number}: {brief(cell)} is not a computation; write stage, "
                    "F, B, I or W, and microbatch, for example 0F3; leave out communication"
                )
                break
            order += [Action(int(m[1]), m[2], int(m[3])) for m in matches if m]
        if not order and not problems:
            problems.append(
                f"{_KEY}: {path}:{number}: rank {number - 1} computes nothing; every rank needs a "
                "stage"
            )
        orders.append(order)
    if len(rows) != degree:
        problems.append(
            f"{_KEY}: {path} has {len(rows)} rows, one per rank, but "
            f"parallelism.pipeline_parallel_degree is {degree}"
        )
    return orders, problems


def order_problems(path: str, orders: list[list[Action]], stages: int) -> Iterator[str]:
    """Why a schedule would compute something wrong or never finish; the first reason only."""
    key = f"{_KEY}: {path}"
    owner: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if owner.setdefault(action.stage, rank) != rank:
                yield f"{key}: stage {action.stage} is on ranks {owner[action.stage]} and {rank}"
                return
    counts = Counter(action for order in orders for action in order)
    microbatches = {action.microbatch for action in counts}
    for stage, microbatch in itertools.product(range(stages), sorted(microbatches)):
        kinds = "".join(kind * counts[Action(stage, kind, microbatch)] for kind in "FBIW")
        if kinds not in ("FB", "FIW"):
            found = f"stage {stage}, microbatch {microbatch} has {kinds or 'nothing'}"
            yield f"{key}: {found}; it needs F and B, or F, I and W"
            return
    last = stages - 1
    order = orders[owner[last]]
    forwards = [a.microbatch for a in order if a.stage == last and a.kind == "F"]
    if forwards != list(range(len(microbatches))):
        yield (
            f"{key}: the last stage must run the forwards of its microbatches in the order 0, 1, "
            "2, ..."
        )
        return
    try:
        execute(orders)
    except DeadlockError as error:
        yield f"{key}: {error}"


class Step(NamedTuple):
    """One computation of an executed schedule."""

    rank: int
    action: Action
    source: int
    """Index, among the steps, of the computation whose result this one waits for; -1: none."""
    remote: bool
    """The source is on another rank."""


class DeadlockError(ValueError):
    """A rank waits for a computation that can never run."""


def execute(orders: Sequence[Sequence[Action]]) -> list[Step]:
    """Execute a schedule: each rank its own order, each computation after the one it waits for.

    Args:
        orders: the computations of each rank.

    Returns:
        Every computation, after its source.

    Raises:
        DeadlockError: the first rank that can't continue, and where it stops.
    """
    last_stage = max(action.stage for order in orders for action in order)
    done: dict[tuple[int, str, int], int] = {}
    steps: list[Step] = []
    position = [0] * len(orders)
    before = -1
    while before < len(steps):
        before = len(steps)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                needed = waits_for(action, last_stage)
                source = done.get((*needed, action.microbatch)) if needed else -1
                if source is None:
                    break
                if action.kind != "W":
                    kind = "F" if action.kind == "F" else "B"
                    done[action.stage, kind, action.microbatch] = len(steps)
                remote = source >= 0 and steps[source].rank != rank
                steps.append(Step(rank, action, source, remote))
                position[rank] += 1
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            stuck = order[position[rank]]
            raise DeadlockError(
                f"can never run {stuck} of rank {rank}: what it waits for comes later"
            )
    return steps


def waits_for(action: Action, last_stage: int) -> tuple[int, str] | None:
    """Stage and kind (`F`, or `B` for B and I) of what `action` waits for; None for the first
    stage's forwards.
    """
    if action.kind == "F":
        return (action.stage - 1, "F") if action.stage else None
    if action.kind == "W":
        return action.stage, "B"
    return (action.stage + 1, "B") if action.stage < last_stage else (action.stage, "F")
