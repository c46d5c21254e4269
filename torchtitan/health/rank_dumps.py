"""What the ranks wrote when a run stopped moving: read from disk and put into words. Imports no
torch.

`health/hang_watch.py` writes the state of each rank, torch's Flight Recorder its last collectives.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.utils.activity import DATA, SAVING, Exchange
from torchtitan.utils.formats import safe_loads

STATE = "state-{}.json"
_MOST_RANKS = 2**20
_MOST_SPLITS = 8

_LIBRARY = re.compile(
    r"(site|dist)-packages/(?!torchtitan/)|/lib/python3[\d.]*/(?!(site|dist)-packages/)|^<"
)
_DISPATCH = re.compile(r"torch/(_ops\.py|_library/)")
"""Frames between a call of torch.distributed and the operation that waits."""
_ROWS = re.compile(r" \[(\d+), \d+\]$")
_PEER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class Group(NamedTuple):
    """A process group. The name alone is not unique: groups split off together share it."""

    name: str
    description: str
    ranks: tuple[int, ...]


class Collective(NamedTuple):
    """One entry of a rank's Flight Recorder."""

    group: Group
    number: int
    """Sequence number in its group; sends and receives are counted separately."""
    op: str
    tensors: str
    done: bool
    created: int
    at: str
    """Where it was called."""
    peer: int | None
    """The other rank of a send or receive."""


@dataclass
class Witness:
    """What one rank wrote."""

    state: dict[str, Any] = field(default_factory=dict)
    """See `watch.Watch`; empty if only a Flight Recorder dump was found."""
    groups: dict[str, Group] = field(default_factory=dict)
    """The rank's process groups, by name."""
    collectives: list[Collective] = field(default_factory=list)

    def last(self, group: Group) -> int:
        """Number of the last collective the rank entered in a group."""
        return max(
            (c.number for c in self.collectives if c.group == group and c.peer is None), default=0
        )

    @property
    def exchanges(self) -> list[Exchange]:
        """Its last exchanges of experts' rows, oldest first."""
        return [Exchange(**exchange) for exchange in self.state.get("exchanges", ())]

    def exchange_in(self, collective: Collective) -> Exchange | None:
        """The exchange that one of its collectives is, if known: both records have the same
        order.
        """
        exchanges = self.exchanges
        for c in reversed(self.collectives):
            rows = _ROWS.search(c.tensors)
            last = exchanges[-1] if exchanges else None
            if (
                last
                and rows
                and c.op.startswith("all_to_all")
                and c.group.ranks == tuple(last.ranks)
            ):
                if int(rows[1]) != sum(last.sent):
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
    def blocked(self) -> bool:
        """Whether the main thread is inside a call of torch.distributed.

        Meaningful only on the CPU: with CUDA the host runs ahead.
        """
        files = [frame[0] for frame in self.state.get("threads", {}).get("MainThread", [])]
        inner = next((f for f in files if not _DISPATCH.search(f)), "")
        return "torch/distributed/" in inner

    def place(self) -> str:
        """`file:line in function`, outside libraries, of the main thread or the one that reads or
        saves for it.
        """
        if error := self.state.get("error"):
            return where(error["frames"])
        threads: dict[str, list[Any]] = self.state.get("threads", {})
        folders = {
            DATA: ("torchtitan/data/",),
            SAVING: ("torchtitan/checkpoint/", "torch/distributed/checkpoint/"),
        }
        for phase, wanted in folders.items():
            for name, frames in threads.items():
                inside = any(folder in frame[0] for frame in frames for folder in wanted)
                if self.phase.startswith(phase) and name != "MainThread" and inside:
                    return where(frames)
        return where(threads.get("MainThread", []))

    def doing(self) -> str:
        """What the rank is doing, in words."""
        if not self.state:
            return "it wrote only its collectives"
        if error := self.state.get("error"):
            return (
                f"it raised {error['type']} in step {self.state['step']} while {self.phase}, "
                f"at {self.place()}"
            )
        lasts = (
            f"it has been {self.phase} for {self.state['seconds']:.0f} s in step "
            f"{self.state['step']}"
        )
        return f"{lasts}, at {self.place()}"


@dataclass
class Case:
    """What all ranks wrote about one incident."""

    world: int
    why: str
    witnesses: dict[int, Witness]
    silent: dict[int, str]
    """Ranks that wrote nothing, and what is known about their processes."""

    def idle(self, rank: int) -> bool:
        """Whether the rank is not known to be inside a call of torch.distributed."""
        return rank not in self.witnesses or not self.witnesses[rank].blocked

    def describe(self, collective: Collective | None) -> str:
        if collective is None:
            return "a send or receive, or a collective, that was not recorded"
        _, axis, ranks = collective.group
        if axis == "default_pg":  # also the group of an axis that spans all ranks
            degrees: dict[str, int] = next(
                (w.state["degrees"] for w in self.witnesses.values() if w.state), {}
            )
            axis = " = ".join(
                ["all ranks", *(axis for axis, degree in degrees.items() if degree == self.world)]
            )
        name = axis.removeprefix("mesh_")
        return (
            f"{collective.op} #{collective.number} of {name} ({collective.tensors}; "
            f"{name_ranks(ranks)})"
        )

    def describe_splits(self, rank: int, collective: Collective | None) -> str:
        """The rows that a rank sends and expects in a collective; empty if it is no exchange of
        experts' rows.
        """
        if collective is None or (exchange := self.witnesses[rank].exchange_in(collective)) is None:
            return ""
        return (
            f"sends {_split(exchange.sent)} rows to these ranks and expects "
            f"{_split(exchange.expected)} from them"
        )

    def describe_silent(self, ranks: Iterable[int]) -> str:
        """The first of some silent ranks, and the others about which the same is known."""
        text = self.silent[min(ranks)]
        return f"{name_ranks(r for r in ranks if self.silent[r] == text)} {text}"


def read_case(folder: Path, prefix: str = "rank_", since: float = 0) -> Case | None:
    """The newest case in a folder of dumps, if it is not older than `since` (seconds since the
    epoch).

    Raises:
        ValueError, TypeError, LookupError, AttributeError: a report is damaged.
    """
    states = {}
    for path in folder.glob(STATE.format("*")):
        state = json.loads(path.read_text())
        states[state["rank"]] = state
    ask = max(
        (state["ask"] for state in states.values()), key=lambda ask: ask["time"], default=None
    )
    states = {rank: state for rank, state in states.items() if state["ask"] == ask}
    asked = ask["time"] if ask else 0.0
    witnesses = {rank: Witness(state) for rank, state in states.items()}
    for path in folder.glob(prefix + "*"):
        number = path.name.removeprefix(prefix)
        if not number.isdigit() or (
            int(number) not in states and path.stat().st_mtime < max(asked, since)
        ):
            continue  # from an earlier case
        try:
            _add_collectives(
                witnesses.setdefault(int(number), Witness()), safe_loads(path.read_bytes())
            )
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
        ):  # its writer was killed, or it is no dump
            continue
    if not witnesses or (ask and asked < since):
        return None
    members = [r for w in witnesses.values() for group in w.groups.values() for r in group.ranks]
    world = max(
        [*(state["world"] for state in states.values()), *(r + 1 for r in (*witnesses, *members))]
    )
    if world > _MOST_RANKS:
        raise ValueError(f"a report names rank {world - 1:,}")
    silent = {r: "gave no answer" for r in range(world) if r not in witnesses}
    for state in states.values():
        silent |= {int(r): text for r, text in state.get("silent", {}).items() if int(r) in silent}
    return Case(world, ask["why"] if ask else "", witnesses, silent)


def _add_collectives(witness: Witness, dump: dict[str, Any]) -> None:
    for name, about in dump["pg_config"].items():
        ranks = about["ranks"]
        numbers = re.findall("[0-9]+", ranks) if isinstance(ranks, str) else ranks
        witness.groups[name] = Group(name, about["desc"], tuple(map(int, numbers)))
    for entry in dump.get("entries", ()):
        group = witness.groups.get(str(entry["process_group"][0]))
        if group is None or len(group.ranks) < 2:
            continue
        peer = None
        if entry["is_p2p"]:
            match = _PEER.search(entry["profiling_name"])
            if match is None:
                continue
            peer = group.ranks[int(match[3])]
        kinds = entry.get("input_dtypes") or [""]
        tensors = ", ".join(
            f"{kind} {size}" for kind, size in zip(kinds, entry["input_sizes"], strict=False)
        )
        frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
        op = entry["profiling_name"].split(":")[-1].lstrip("_")
        if op == "all_reduce" and any("reduce_scatter" in name for *_, name in frames[:5]):
            op = "reduce_scatter"  # gloo implements it with an all-reduce
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        done = entry["state"] == "completed"
        created = entry["time_created_ns"]
        witness.collectives.append(
            Collective(group, number, op, tensors, done, created, where(frames), peer)
        )


def is_library(file: str) -> bool:
    """Whether a file of Python code belongs to a library, not to this project or the user."""
    return _LIBRARY.search(file) is not None


def where(frames: Iterable[Any]) -> str:
    """`file:line in function` of the innermost of `(file, line, function)` outside libraries, or
    else the innermost.
    """
    frames = list(frames)
    for file, line, function in [f for f in frames if not is_library(f[0])] or frames:
        path = Path(file)
        short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{short}:{line} in {function}"
    return "an unknown place"


def _split(rows: Sequence[int]) -> str:
    """Numbers of rows: `3, 0, 5, 12`, or of many ranks their range."""
    return ", ".join(map(str, rows)) if len(rows) <= _MOST_SPLITS else f"{min(rows)} to {max(rows)}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2-5`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' * (len(ordered) > 1)} {text}"
