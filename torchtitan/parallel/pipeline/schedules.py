"""Check and simulate a pipeline schedule: each rank's computations in order.

Here a schedule from a file is checked before any process starts; torch's loader reads it again to
run it. A row of the file lists the computations of one rank, for example `0F0,0F1,0B0,0B1`: stage,
kind, microbatch. `config/pipeline_schedules.py` has the table of named schedules. Imports no torch.
"""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan.config.pipeline_schedules import FileSchedule
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.files import read_regular, text_of
from torchtitan.utils.limits import PIPELINE_SCHEDULE_BYTES
from torchtitan.utils.wording import brief, plural


@dataclass(frozen=True)
class Action:
    """A computation: forward `F`, backward `B`, or its halves for inputs `I` and weights `W`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Entry = tuple[Action, ...]
"""Computations of a rank that begin together: one, or a forward with a backward."""

_ACTION = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_KEY = "parallelism.pipeline_parallel_schedule_csv"


def schedule_file(config: Config) -> FileSchedule | None:
    """The schedule in the file that the configuration names, or None without a file.

    Raises:
        ConfigError: the file can't be read, or its schedule can't run.
    """
    p = config.parallelism
    path = p.pipeline_parallel_schedule_csv
    if not path or p.pipeline_parallel_degree == 1:
        return None
    try:
        return _check(orders_of(path), p.pipeline_parallel_degree)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"{_KEY}: can't read {path!r}: {reason}"]) from error
    except ScheduleError as error:
        raise ConfigError([f"{_KEY}: {path}{error}"]) from error


def orders_of(path: str) -> list[list[Entry]]:
    """The entries of each rank in a schedule's file.

    Raises:
        ScheduleError: one is not a computation.
    """
    text = text_of(read_regular(Path(path), PIPELINE_SCHEDULE_BYTES, links=True))
    return [_parse(row, rank) for rank, row in enumerate(csv.reader(text.splitlines()))]


class ScheduleError(ValueError):
    """A schedule can't run. The message continues the name of its file."""


def _parse(row: Sequence[str], rank: int) -> list[Entry]:
    """The entries of one rank. A pair is written `(0F1;3B0)OVERLAP_F_B`."""
    entries = []
    for cell in filter(None, map(str.strip, row)):
        texts = cell.removesuffix("OVERLAP_F_B").strip("()").split(";")
        matches = [_ACTION.fullmatch(text.strip()) for text in texts]
        actions = tuple(Action(int(m[1]), m[2], int(m[3])) for m in matches if m)
        if len(actions) < len(texts):
            raise ScheduleError(
                f":{rank + 1}: {brief(cell)} is not a computation; write stage, F, B, I or W, and "
                "microbatch, for example 0F3; leave out communication"
            )
        entries.append(actions)
    if not entries:
        raise ScheduleError(f":{rank + 1}: rank {rank} computes nothing; every rank needs a stage")
    return entries


def _check(orders: Sequence[Sequence[Entry]], degree: int) -> FileSchedule:
    """Refuse an order that computes something twice or never, or whose ranks wait forever."""
    if len(orders) != degree:
        raise ScheduleError(
            f" has {plural(len(orders), 'row')}; write one per rank: "
            f"parallelism.pipeline_parallel_degree is {degree}"
        )
    owner: dict[int, int] = {}
    counts: Counter[Action] = Counter()
    for rank, order in enumerate(orders):
        for action in itertools.chain.from_iterable(order):
            counts[action] += 1
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f": stage {action.stage} is on ranks {owner[action.stage]} and {rank}"
                )
    stages = max(owner) + 1
    microbatches = sorted({action.microbatch for action in counts})
    for stage, microbatch in itertools.product(range(stages), microbatches):
        kinds = "".join(kind * counts[Action(stage, kind, microbatch)] for kind in "FBIW")
        if kinds not in ("FB", "FIW"):
            raise ScheduleError(
                f": stage {stage}, microbatch {microbatch} has {kinds or 'nothing'}; it needs F "
                "and B, or F, I and W"
            )
    last_forwards = [
        action.microbatch
        for action in itertools.chain.from_iterable(orders[owner[stages - 1]])
        if action.stage == stages - 1 and action.kind == "F"
    ]
    if last_forwards != list(range(len(microbatches))):
        raise ScheduleError(
            ": the last stage must run the forwards of its microbatches in the order 0, 1, 2, ..."
        )
    execute(orders)
    return FileSchedule(tuple(owner[stage] for stage in range(stages)), len(microbatches))


class ScheduledAction(NamedTuple):
    """One computation of a simulated schedule."""

    rank: int
    action: Action
    source: int
    """Index in the list of the computation whose result this one waits for; -1: none."""
    remote: bool
    """Whether the source is on another rank."""


def execute(orders: Sequence[Sequence[Entry]]) -> list[ScheduledAction]:
    """Simulate a schedule: each rank runs its entries in order, each as soon as its inputs exist.

    Args:
        orders: the entries of each rank.

    Returns:
        Every computation, after its source.

    Raises:
        ScheduleError: some rank can't continue; the message has the rank and where it stops.
    """
    last_stage = max(action.stage for order in orders for entry in order for action in entry)
    producers: dict[tuple[int, str, int], int] = {}
    steps: list[ScheduledAction] = []
    position = [0] * len(orders)
    steps_before = -1
    while steps_before < len(steps):
        steps_before = len(steps)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                entry = order[position[rank]]
                needs = [_waits_for(action, last_stage) for action in entry]
                if not all(need is None or need in producers for need in needs):
                    break
                sources = [-1 if need is None else producers[need] for need in needs]
                for action, source in zip(entry, sources, strict=True):
                    if action.kind != "W":
                        result = "F" if action.kind == "F" else "B"
                        producers[action.stage, result, action.microbatch] = len(steps)
                    remote = source >= 0 and steps[source].rank != rank
                    steps.append(ScheduledAction(rank, action, source, remote))
                position[rank] += 1
    blocked_entries = [
        (rank, order[position[rank]])
        for rank, order in enumerate(orders)
        if position[rank] < len(order)
    ]
    if blocked_entries:
        raise ScheduleError(_deadlock(blocked_entries))
    return steps


def _deadlock(blocked_entries: Sequence[tuple[int, Entry]]) -> str:
    """The reason why ranks can't run their next entries, for the first pair or the first entry."""
    rank, entry = next((item for item in blocked_entries if len(item[1]) > 1), blocked_entries[0])
    if len(entry) == 1:
        return f": can never run {entry[0]} of rank {rank}: what it waits for comes later"
    return (
        f": can never run {' with '.join(map(str, entry))} of rank {rank}: both parts of a pair "
        "(OVERLAP_F_B) begin together, but one can only follow the other; write them as two entries"
    )


def _waits_for(action: Action, last_stage: int) -> tuple[int, str, int] | None:
    """The computation whose result `action` needs: stage, kind (`F`, or `B` for B and I) and
    microbatch. None for the first stage's forwards.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return (stage - 1, "F", microbatch) if stage else None
    if action.kind == "W":
        return stage, "B", microbatch
    return (stage + 1, "B", microbatch) if stage < last_stage else (stage, "F", microbatch)
