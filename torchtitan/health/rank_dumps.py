"""The ranks' dumps of a run that stopped moving: read from disk and described. Imports no torch.

`health/hang_watch.py` writes each rank's state, and torch's Flight Recorder its last collectives.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.health.collectives import Collective, Group, describe_group, name_ranks
from torchtitan.utils.activity import DATA, SAVING, Exchange
from torchtitan.utils.formats import safe_loads
from torchtitan.utils.limits import MOST_RANKS

STATE = "state-{}.json"
CRASH = "crash-{}.txt"
"""A rank's stacks at a fatal signal, as `faulthandler` writes them."""
_MAX_SPLITS = 8
_EQUAL_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_LIBRARY = re.compile(
    r"(site|dist)-packages/(?!torchtitan/)|/lib/python3[\d.]*/(?!(site|dist)-packages/)|^<"
)
_DISPATCH = re.compile(r"torch/(_ops\.py|_library/)")
"""Frames between a call of torch.distributed and the operation that waits."""
_ROWS = re.compile(r" \[(\d+), \d+\]$")
_PEER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_NOT_A_DUMP = (ValueError, TypeError, LookupError, AttributeError)
_WORKING_THREADS = {
    DATA: re.compile("torchtitan/data/"),
    SAVING: re.compile("torchtitan/checkpoint/|torch/distributed/checkpoint/"),
}
"""Activity, and the folders of the code that another thread runs for it."""


@dataclass(frozen=True)
class RecordedCollective(Collective):
    """An entry of a rank's Flight Recorder."""

    is_over: bool = True
    created: int = 0
    """Nanoseconds since the epoch."""
    peer: int | None = None
    """The other rank of a send or receive."""

    @property
    def call(self) -> tuple[str, str, int | None]:
        """The properties that must be equal on all members of the group; the tensors only for
        operations of equal sizes.
        """
        has_equal_sizes = self.op.replace("_base", "").startswith(_EQUAL_SIZES)
        return self.op, self.tensors if has_equal_sizes else "", None


@dataclass
class RankDump:
    """The dump of one rank."""

    state: dict[str, Any] = field(default_factory=dict)
    """See `hang_watch.Watch`; empty if only a Flight Recorder dump was found."""
    groups: dict[str, Group] = field(default_factory=dict)
    """The rank's process groups, by torch's name."""
    collectives: list[RecordedCollective] = field(default_factory=list)

    def last(self, group: Group) -> int:
        """Number of the last collective the rank entered in a group."""
        numbers = (c.number for c in self.collectives if c.group == group and c.peer is None)
        return max(numbers, default=0)

    @property
    def exchanges(self) -> list[Exchange]:
        """Its last exchanges of experts' rows, oldest first."""
        return [Exchange(**exchange) for exchange in self.state.get("exchanges", ())]

    def exchange_in(self, collective: RecordedCollective) -> Exchange | None:
        """The exchange that one of its collectives is, if known.

        Both records have the same order.
        """
        exchanges = self.exchanges
        for c in reversed(self.collectives):
            if not exchanges:
                break
            last = exchanges[-1]
            rows = _ROWS.search(c.tensors)
            in_group = c.op.startswith("all_to_all") and c.group.ranks == tuple(last.ranks)
            if not in_group or rows is None or int(rows[1]) != sum(last.sent):
                continue
            if c is collective:
                return last
            exchanges.pop()
        return None

    @property
    def pid(self) -> int | None:
        return self.state.get("process", [None])[0]

    @property
    def phase(self) -> str:
        return self.state.get("phase", "")

    @property
    def error(self) -> dict[str, Any] | None:
        """The exception that the rank raised, if any."""
        return self.state.get("error")

    @property
    def blocked(self) -> bool:
        """Whether the rank computes in a call of torch.distributed.

        Meaningful only on the CPU: with CUDA the host runs ahead.
        """
        return _in_collective(self.frames)

    @property
    def _threads(self) -> dict[str, list[Any]]:
        """The stack of each thread, innermost frame first."""
        return self.state.get("threads", {})

    @property
    def frames(self) -> list[Any]:
        """The stack of the main thread."""
        return self._threads.get("MainThread", [])

    def location(self) -> str:
        """`file:line in function`, outside libraries, of the thread that does the work."""
        if self.error:
            return where(self.error["frames"])
        for activity, folder in _WORKING_THREADS.items():
            if not self.phase.startswith(activity):
                continue
            for name, frames in self._threads.items():
                does_it = any(folder.search(frame[0]) for frame in frames)
                if does_it and name != "MainThread":
                    return where(frames)
        return where(self.frames)

    def doing(self) -> str:
        """The rank's activity, as the predicate of a sentence."""
        if not self.state:
            return "wrote only its collectives"
        step = f"in step {self.state['step']}"
        if self.error:
            return f"raised {self.error['type']} {step} while {self.phase}, at {self.location()}"
        seconds = self.state["seconds"]
        return f"has been {self.phase} for {seconds:.0f} s {step}, at {self.location()}"


@dataclass
class Dumps:
    """All ranks' dumps of one incident."""

    world: int
    why: str
    by_rank: dict[int, RankDump]
    silent: dict[int, str]
    """Ranks that wrote nothing, and the state of their processes."""
    aborted: dict[int, str] = field(default_factory=dict)
    """Ranks that a thread without Python aborted, and where in a collective they were."""

    def idle(self, rank: int) -> bool:
        """Whether the rank is not known to be inside a call of torch.distributed."""
        return rank not in self.by_rank or not self.by_rank[rank].blocked

    def describe_splits(self, rank: int, collective: RecordedCollective | None) -> str:
        """The rows that a rank sends and expects; empty if not an exchange of experts' rows."""
        if collective is None:
            return ""
        exchange = self.by_rank[rank].exchange_in(collective)
        if exchange is None:
            return ""
        sent = _splits(exchange.sent)
        return (
            f"sends {sent} rows to these ranks and expects {_splits(exchange.expected)} from them"
        )

    def describe_silent(self, ranks: Iterable[int]) -> str:
        """The state of the first of some silent ranks, and all ranks that share it."""
        text = self.silent[min(ranks)]
        return f"{name_ranks(r for r in ranks if self.silent[r] == text)} {text}"


def read_dumps(folder: Path, prefix: str = "rank_", since: float = 0) -> Dumps | None:
    """The newest incident in a folder of dumps, unless it is older than `since`.

    Args:
        since: seconds since the epoch.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: a report is damaged.
    """
    ask, states = _newest_states(folder)
    if ask and ask["time"] < since:
        ask, states = None, {}
    ask_time = ask["time"] if ask else 0.0
    by_rank = {rank: RankDump(state) for rank, state in states.items()}
    degrees: dict[str, int] = next((state["degrees"] for state in states.values()), {})
    for path in folder.glob(prefix + "*"):
        number = path.name.removeprefix(prefix)
        if not number.isdigit():
            continue
        rank = int(number)
        if rank not in states and path.stat().st_mtime < max(ask_time, since):
            continue  # from an earlier incident
        dump = by_rank.setdefault(rank, RankDump())
        try:
            _add_collectives(dump, safe_loads(path.read_bytes()), degrees)
        except _NOT_A_DUMP:  # or its writer was killed
            continue
    if not by_rank:
        return None
    world = max(by_rank) + 1
    for dump in by_rank.values():
        world = max(world, dump.state.get("world", 0))
        for group in dump.groups.values():
            world = max(world, max(group.ranks, default=-1) + 1)
    if world > MOST_RANKS:
        raise ValueError(f"a report names rank {world - 1:,}")
    silent = {rank: "gave no answer" for rank in range(world) if rank not in by_rank}
    for state in states.values():
        for rank, text in state.get("silent", {}).items():
            if int(rank) in silent:
                silent[int(rank)] = text
    return Dumps(world, ask["why"] if ask else "", by_rank, silent)


def read_crashes(folder: Path) -> dict[int, tuple[str, bool]]:
    """For each rank that a fatal signal ended, where its main thread was, or the Python thread that
    crashed; and whether another thread crashed while the main one was in a collective.
    """
    crashes = {}
    for path in folder.glob(CRASH.format("*")):
        text = path.read_text(errors="replace")
        current = text.partition("Current thread")[2]
        if frames := _FRAME.findall(current or text.rpartition("Thread 0x")[2]):
            rank = int(path.stem.removeprefix("crash-"))
            crashes[rank] = where(frames), not current and _in_collective(frames)
    return crashes


def _newest_states(folder: Path) -> tuple[dict[str, Any] | None, dict[int, dict[str, Any]]]:
    """The newest request for dumps, and the states that ranks wrote in response."""
    states = [json.loads(path.read_text()) for path in folder.glob(STATE.format("*"))]
    asks = [state["ask"] for state in states]
    ask = max(asks, key=lambda ask: ask["time"], default=None)
    return ask, {state["rank"]: state for state in states if state["ask"] == ask}


def _add_collectives(dump: RankDump, record: dict[str, Any], degrees: Mapping[str, int]) -> None:
    for name, config in record["pg_config"].items():
        members = config["ranks"]
        numbers = re.findall("[0-9]+", members) if isinstance(members, str) else members
        ranks = tuple(map(int, numbers))
        dump.groups[name] = Group(ranks, describe_group(config["desc"], ranks, degrees), name=name)
    for entry in record.get("entries", ()):
        group = dump.groups.get(str(entry["process_group"][0]))
        if group is not None and len(group.ranks) > 1 and (collective := _parse(entry, group)):
            dump.collectives.append(collective)


def _parse(entry: Mapping[str, Any], group: Group) -> RecordedCollective | None:
    """An entry of a Flight Recorder; None for a send or receive that doesn't name its peer."""
    peer = None
    number = entry["collective_seq_id"]
    if entry["is_p2p"]:
        number = entry["p2p_seq_id"]
        match = _PEER.search(entry["profiling_name"])
        if match is None:
            return None
        peer = group.ranks[int(match[3])]
    dtypes = entry.get("input_dtypes") or [""]
    sizes = zip(dtypes, entry["input_sizes"], strict=False)
    frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
    op = entry["profiling_name"].split(":")[-1].lstrip("_")
    if op == "all_reduce" and any("reduce_scatter" in name for *_, name in frames[:5]):
        op = "reduce_scatter"  # gloo implements it with an all-reduce
    return RecordedCollective(
        group,
        number,
        op,
        tensors=", ".join(f"{dtype} {size}" for dtype, size in sizes),
        at=where(frames),
        is_over=entry["state"] == "completed",
        created=entry["time_created_ns"],
        peer=peer,
    )


def _in_collective(frames: Iterable[Any]) -> bool:
    """Whether a thread is in a call of torch.distributed."""
    files = (file for file, *_ in frames if not _DISPATCH.search(file))
    return "torch/distributed/" in next(files, "")


def is_library(file: str) -> bool:
    """Whether a file of Python code belongs to a library, not to this project or the user."""
    return _LIBRARY.search(file) is not None


def where(frames: Iterable[Any]) -> str:
    """`file:line in function` of the innermost frame outside libraries, or else the innermost.

    Args:
        frames: `(file, line, function)`, innermost first.
    """
    frames = list(frames)
    for file, line, function in [f for f in frames if not is_library(f[0])] or frames:
        path = Path(file)
        local_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{local_path}:{line} in {function}"
    return "an unknown place"


def _splits(rows: Sequence[int]) -> str:
    """`3, 0, 5, 12`, or the range of many numbers."""
    if len(rows) > _MAX_SPLITS:
        return f"{min(rows)} to {max(rows)}"
    return ", ".join(map(str, rows))
