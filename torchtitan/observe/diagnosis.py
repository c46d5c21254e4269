"""What the ranks wrote down when a run stopped moving, read as one sentence: who holds the others up, and where.

Ranks are the nodes of a graph. One points to those it waits for: members of a group that have not entered the
collective it is in, the other end of a send or receive. Who is waited for and waits for nobody is the cause. That he
keeps dozens waiting in other groups, who are all further on or further back, doesn't matter then. Imports no torch.
"""

import ast
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, NamedTuple

from torchtitan.utils.phase import CHECKPOINT_GROUP, DATA, SAVING

STATE = "state-{}.json"

_LIBRARY = re.compile(r"(site|dist)-packages/(?!torchtitan/)|/lib/python3[\d.]*/(?!(site|dist)-packages/)|^<")
_EQUAL_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_DISPATCH = re.compile(r"torch/(_ops\.py|_library/)")
"""What stands between a call of torch.distributed and the operation that waits."""
_PEER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class Group(NamedTuple):
    """A process group. Names alone are not enough: groups split off together share theirs."""

    name: str
    description: str
    ranks: tuple[int, ...]


class Collective(NamedTuple):
    """One entry of a rank's Flight Recorder."""

    group: Group
    number: int
    """In its group; of sends and receives, in the group too, but counted apart."""
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
    """See `watch.Watch`; empty if only a Flight Recorder's dump was found."""
    groups: dict[str, Group] = field(default_factory=dict)
    """The rank's, by name."""
    collectives: list[Collective] = field(default_factory=list)

    def last(self, group: Group) -> int:
        """Number of the collective that the rank entered last in a group."""
        return max((c.number for c in self.collectives if c.group == group and c.peer is None), default=0)

    @property
    def pid(self) -> int | None:
        return self.state.get("process", [None])[0]

    @property
    def phase(self) -> str:
        return self.state.get("phase", "")

    @property
    def blocked(self) -> bool:
        """The main thread stands in a call of torch.distributed, on the CPU: on CUDA the host runs ahead."""
        files = [frame[0] for frame in self.state.get("threads", {}).get("MainThread", [])]
        inner = next((f for f in files if not _DISPATCH.search(f)), "")
        return "torch/distributed/" in inner

    def place(self) -> str:
        """`file:line in function`, outside of libraries, of the main thread, or of the one it lets read or save."""
        if error := self.state.get("error"):
            return _place(error["frames"])
        threads: dict[str, list[Any]] = self.state.get("threads", {})
        for phase, folder in ((DATA, "/data/"), (SAVING, "/checkpoint/")):
            for name, frames in threads.items():
                if self.phase.startswith(phase) and name != "MainThread" and any(folder in f[0] for f in frames):
                    return _place(frames)
        return _place(threads.get("MainThread", []))

    def standing(self) -> str:
        """What the rank does, in words."""
        if not self.state:
            return "it wrote only its collectives"
        if error := self.state.get("error"):
            return f"{error['type']} in step {self.state['step']}, {self.phase}, at {self.place()}"
        lasts = f"it has been {self.phase} for {self.state['seconds']:.0f} s in step {self.state['step']}"
        return f"{lasts}, at {self.place()}"


@dataclass
class Case:
    """What was written down at one time."""

    world: int
    why: str
    witnesses: dict[int, Witness]
    silent: dict[int, str]
    """Ranks that wrote nothing, and what is known of their processes."""

    def idle(self, rank: int) -> bool:
        """Whether the rank is not known to stand in a call of torch.distributed."""
        return rank not in self.witnesses or not self.witnesses[rank].blocked

    def describe(self, collective: Collective | None) -> str:
        if collective is None:
            return "a send or receive, or a collective, that was not recorded"
        _, axis, ranks = collective.group
        if axis == "default_pg":  # that of an axis, too, which spans all ranks
            degrees: dict[str, int] = next((w.state["degrees"] for w in self.witnesses.values() if w.state), {})
            axis = " = ".join(["all ranks", *(axis for axis, degree in degrees.items() if degree == self.world)])
        name = axis.removeprefix("mesh_")
        return f"{collective.op} #{collective.number} of {name} ({collective.tensors}; {_ranks(ranks)})"

    def describe_silent(self, ranks: Iterable[int]) -> str:
        """The first of some silent ranks, and those of which the same is known."""
        text = self.silent[min(ranks)]
        return f"{_ranks(r for r in ranks if self.silent[r] == text)} {text}"


def read_case(folder: Path, prefix: str = "rank_", since: float = 0) -> Case | None:
    """The newest case in a folder of dumps that is not older than `since` (seconds since the epoch)."""
    states = {}
    for path in folder.glob(STATE.format("*")):
        state = json.loads(path.read_text())
        states[state["rank"]] = state
    ask = max((state["ask"] for state in states.values()), key=lambda ask: ask["time"], default=None)
    states = {rank: state for rank, state in states.items() if state["ask"] == ask}
    asked = ask["time"] if ask else 0.0
    witnesses = {rank: Witness(state) for rank, state in states.items()}
    for path in folder.glob(prefix + "*"):
        number = path.name.removeprefix(prefix)
        if not number.isdigit() or (int(number) not in states and path.stat().st_mtime < max(asked, since)):
            continue  # of an earlier case
        try:
            _add_collectives(witnesses.setdefault(int(number), Witness()), pickle.loads(path.read_bytes()))
        except (pickle.UnpicklingError, EOFError):  # NCCL's watchdog was killed while it wrote
            continue
    if not witnesses or (ask and asked < since):
        return None
    members = [r for w in witnesses.values() for group in w.groups.values() for r in group.ranks]
    world = max([*(state["world"] for state in states.values()), *(r + 1 for r in (*witnesses, *members))])
    silent = {r: "gave no answer" for r in range(world) if r not in witnesses}
    for state in states.values():
        silent |= {int(r): text for r, text in state.get("silent", {}).items() if int(r) in silent}
    return Case(world, ask["why"] if ask else "", witnesses, silent)


def diagnose(case: Case, exits: Mapping[int, int] | None = None) -> str:
    """Name the cause, in a sentence.

    Args:
        exits: exit codes of ranks whose processes have ended, as far as they are known.
    """
    for rank, code in (exits or {}).items():
        if code < 0 and code != -SIGTERM and rank in case.silent:  # SIGTERM is how torchrun ends the others
            case.silent[rank] = killed(code)
    failed = {r: w.state["error"] for r, w in case.witnesses.items() if w.state.get("error")}
    raised = [rank for rank, error in failed.items() if error["cause"]]
    if raised:
        rank = min(raised, key=lambda r: case.witnesses[r].state["time"])
        what = f"{failed[rank]['type']}: {failed[rank]['text']}"
        witness = case.witnesses[rank]
        return f"rank {rank} raised {what}, in step {witness.state['step']}, at {witness.place()}"
    if mismatch := _mismatch(case):
        return mismatch
    if waits := _waits(case):
        return _sink(case, waits)
    if case.silent:
        text = case.describe_silent(case.silent)
        if failed:
            witness = case.witnesses[min(failed)]
            text += f"; rank {min(failed)} lost it in step {witness.state['step']}, at {witness.place()}"
        return text
    known = [w for w in case.witnesses.values() if w.state]
    if not known:
        return "no collective is unfinished"
    slowest = max(known, key=lambda witness: witness.state["seconds"])
    return f"no rank waits for another: of rank {slowest.state['rank']}, {slowest.standing()}"


def _sink(case: Case, waits: "Waits") -> str:
    """Who is waited for and waits for nobody, and the first collective where he is missing."""
    awaited = {peer for edges in waits.values() for _, peers in edges for peer in peers}
    # One may have begun a collective in advance, which waits for the others, and not be in it.
    causes = sorted(awaited - waits.keys()) or sorted(filter(case.idle, awaited))
    if not causes:
        rings = "; ".join(f"rank {r} in {case.describe(edges[0][0])}" for r, edges in sorted(waits.items())[:4])
        return f"the ranks wait for each other, having come there in different order: {rings}"
    # One who is known to be elsewhere is a better answer than one of whom nothing is known; not than a dead process.
    dead = [r for r in causes if not case.silent.get(r, "gave").startswith("gave")]
    cause = min(dead or [r for r in causes if r in case.witnesses] or causes)
    same = [r for r in causes if (r in case.silent) == (cause in case.silent)]
    missing = [(c, r) for r, edges in waits.items() for c, peers in edges if cause in peers]
    first = min((c for c, _ in missing if c), key=lambda c: c.created, default=None)
    waiting = [r for c, r in missing if first is None or (c and (c.group, c.number) == (first.group, first.number))]
    absent = f"did not enter {case.describe(first)}, where {_ranks(waiting)} wait{'s' * (len(waiting) == 1)}"
    if cause in case.silent:
        return f"{case.describe_silent(same)}, and {absent}"
    witness = case.witnesses[cause]
    if witness.phase.startswith(DATA):
        return f"rank {cause} {witness.standing().removeprefix('it ')}, and {absent}"
    return f"{_ranks(same)} {absent}: {witness.standing()}"


def killed(code: int) -> str:
    """A process's negative exit code in words."""
    hint = " (by hand, or for want of memory)" if code == -SIGKILL else ""
    return f"was killed by {Signals(-code).name}{hint}"


def _add_collectives(witness: Witness, dump: dict[str, Any]) -> None:
    for name, about in dump["pg_config"].items():
        ranks = ast.literal_eval(about["ranks"]) if isinstance(about["ranks"], str) else about["ranks"]
        witness.groups[name] = Group(name, about["desc"], tuple(ranks))
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
        tensors = ", ".join(f"{kind} {size}" for kind, size in zip(kinds, entry["input_sizes"], strict=False))
        frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
        op = entry["profiling_name"].split(":")[-1].lstrip("_")
        if op == "all_reduce" and any("reduce_scatter" in name for *_, name in frames[:5]):
            op = "reduce_scatter"  # gloo makes it of an all-reduce
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        done, created = entry["state"] == "completed", entry["time_created_ns"]
        witness.collectives.append(Collective(group, number, op, tensors, done, created, _place(frames), peer))


def _mismatch(case: Case) -> str | None:
    """The first collective of which the ranks of a group don't call the same."""
    calls: dict[tuple[Group, int], dict[int, Collective]] = {}
    for rank, witness in case.witnesses.items():
        for c in witness.collectives:
            if c.peer is None:
                calls.setdefault((c.group, c.number), {})[rank] = c
    for _, by_rank in sorted(calls.items(), key=lambda item: min(c.created for c in item[1].values())):
        kinds: dict[tuple[str, str], list[int]] = {}
        for rank, c in sorted(by_rank.items()):
            sized = c.op.replace("_base", "").startswith(_EQUAL_SIZES)
            kinds.setdefault((c.op, c.tensors if sized else ""), []).append(rank)
        if len(kinds) > 1:
            few, *_, most = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))
            one, other = by_rank[few[0]], by_rank[most[0]]
            return (
                f"{_ranks(few)} entered {case.describe(one)}, at {one.at}, "
                f"where {_ranks(most)} entered {other.op} ({other.tensors}), at {other.at}"
            )
    return None


Waits = dict[int, list[tuple[Collective | None, set[int]]]]
"""Of each rank that waits: in what, the first first, and for whom."""


def _waits(case: Case) -> Waits:
    waits: Waits = {}
    for rank, witness in case.witnesses.items():
        edges: list[tuple[Collective | None, set[int]]] = []
        for c in sorted(witness.collectives, key=lambda c: c.created):
            if c.done or (c.group.description == CHECKPOINT_GROUP and not witness.phase.startswith(SAVING)):
                continue
            if peers := {r for r in c.group.ranks if r != rank and not _entered(case, r, c, rank)}:
                edges.append((c, peers))
        if not edges and witness.blocked:  # gloo records no send or receive, and NCCL's record has nothing of gloo
            in_pipeline = any("/pipelining/" in frame[0] for frame in witness.state["threads"]["MainThread"])
            peers = _stages(case, witness) if in_pipeline else set(filter(case.idle, range(case.world)))
            if peers - {rank}:
                edges.append((None, peers - {rank}))
        if edges:
            waits[rank] = edges
    return waits


def _entered(case: Case, rank: int, collective: Collective, by: int) -> bool:
    """Whether `rank` is in, or past, what `by` waits in."""
    witness = case.witnesses.get(rank)
    if witness is None:
        return False
    if collective.peer is None:
        return witness.last(collective.group) >= collective.number
    if rank != collective.peer:
        return True
    other_end = {"send": "recv", "recv": "send"}[collective.op[:4]]
    return any(
        c.peer == by and c.group == collective.group and c.op.startswith(other_end) and not c.done
        for c in witness.collectives
    )


def _stages(case: Case, witness: Witness) -> set[int]:
    """Ranks of the pipeline that a rank is in."""
    if witness.state["degrees"].get("pp") == case.world:
        return set(range(case.world))
    return {r for group in witness.groups.values() if group.description == "mesh_pp" for r in group.ranks}


def _place(frames: Iterable[Any]) -> str:
    """The innermost of `(file, line, function)` outside of libraries, else simply the innermost."""
    frames = list(frames)
    for file, line, function in [f for f in frames if not _LIBRARY.search(f[0])] or frames:
        path = Path(file)
        short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{short}:{line} in {function}"
    return "an unknown place"


def _ranks(ranks: Iterable[int]) -> str:
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
