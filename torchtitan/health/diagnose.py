"""The cause of a hang in one sentence: which rank blocks the others, and where. No torch imports.

Ranks are the nodes of a graph. A rank points to the ranks it waits for: members of a group that
have not entered the collective it is in, or the other end of a send or receive. The cause is a rank
that others wait for and that waits for nobody. How many ranks it blocks indirectly doesn't matter.
"""

from collections.abc import Mapping
from signal import SIGABRT, SIGTERM

from torchtitan.health.collectives import (
    Group,
    different_calls,
    minority,
    name_ranks,
    uneven_exchange,
)
from torchtitan.health.rank_dumps import Dumps, RankDump, RecordedCollective
from torchtitan.utils.activity import CHECKPOINT_GROUP, DATA, SAVING
from torchtitan.utils.signals import kill_text


def diagnose(
    dumps: Dumps,
    exits: Mapping[int, int] | None = None,
    crashes: Mapping[int, tuple[str, bool]] | None = None,
) -> str:
    """Name the cause in one sentence: the first explanation that fits.

    Args:
        exits: exit codes of ranks whose processes have ended, where known.
        crashes: from `read_crashes`.
    """
    for rank, code in (exits or {}).items():
        # torchrun ends the other ranks with SIGTERM
        if code < 0 and code != -SIGTERM and rank in dumps.silent:
            location, in_collective = (crashes or {}).get(rank, ("", False))
            dumps.silent[rank] = kill_text(code, location)
            if code == -SIGABRT and in_collective:
                dumps.aborted[rank] = location
    explanations = (_uneven, _raised, _mismatch, _aborted, _blocked, _silent, _slowest)
    texts = (explain(dumps) for explain in explanations)
    return next(filter(None, texts), "no collective is unfinished")


# ---- explanations, the most certain first


def _uneven(dumps: Dumps) -> str | None:
    """Ranks disagree about rows that they exchange, so later collectives are undefined."""
    uneven = uneven_exchange({rank: dump.exchanges for rank, dump in dumps.by_rank.items()})
    if uneven is None:
        return None
    doing = dumps.by_rank[uneven.receiver].doing()
    return f"{uneven.text}; rank {uneven.receiver} {doing}"


def _raised(dumps: Dumps) -> str | None:
    """A rank raised an exception that no other rank caused."""
    causes = [dump for dump in dumps.by_rank.values() if dump.error and dump.error["cause"]]
    if not causes:
        return None
    first = min(causes, key=lambda dump: dump.state["time"])
    state = first.state
    text = state["error"]["text"].rstrip(".")
    if state["error"].get("on_all_ranks"):
        return text
    what = f"{state['error']['type']}: {text}"
    return f"rank {state['rank']} raised {what}, in step {state['step']}, at {first.location()}"


def _mismatch(dumps: Dumps) -> str | None:
    """The first collective for which the ranks of a group made different calls."""
    calls: dict[tuple[Group, int], dict[int, RecordedCollective]] = {}
    for rank, dump in dumps.by_rank.items():
        for c in dump.collectives:
            if c.peer is None:
                calls.setdefault((c.group, c.number), {})[rank] = c
    for by_rank in sorted(calls.values(), key=lambda of: min(c.created for c in of.values())):
        sides = minority(by_rank, lambda c: c.call)
        if sides:
            few, most = sides
            return different_calls(few, by_rank[few[0]], most, by_rank[most[0]])
    return None


def _aborted(dumps: Dumps) -> str | None:
    """gloo's thread aborted a rank that received more bytes than it expected. The other rank may
    have completed that collective, and entered the next one.
    """
    for rank, location in dumps.aborted.items():
        for other, dump in dumps.by_rank.items():
            calls = [c for c in dump.collectives if rank in c.group.ranks and c.peer is None]
            if calls:
                calls.sort(key=lambda c: c.created)
                entered = ", then ".join(f"{c.describe()}, at {c.at}" for c in calls[-2:])
                return (
                    f"rank {rank} was killed by SIGABRT in a collective, as gloo does if ranks "
                    f"exchange tensors of different sizes: rank {rank} was at {location}, and rank "
                    f"{other} entered {entered}"
                )
    return None


def _blocked(dumps: Dumps) -> str | None:
    """Ranks wait in a collective that another rank did not enter."""
    waits = _waits(dumps)
    if not waits:
        return None
    cause = _cause(dumps, waits)
    if cause is None:
        first = sorted(waits.items())[:4]
        ring = "; ".join(f"rank {rank} in {_describe(edges[0][0])}" for rank, edges in first)
        return (
            "the ranks wait for each other, because they called collectives in different "
            f"orders: {ring}"
        )
    return _blame(dumps, waits, *cause)


def _silent(dumps: Dumps) -> str | None:
    """Ranks wrote nothing, and no rank is known to wait for them."""
    if not dumps.silent:
        return None
    text = dumps.describe_silent(dumps.silent)
    disconnected_ranks = [rank for rank, dump in dumps.by_rank.items() if dump.error]
    if not disconnected_ranks:
        return text
    rank = min(disconnected_ranks)
    dump = dumps.by_rank[rank]
    text += f"; rank {rank} lost the connection in step {dump.state['step']}, at {dump.location()}"
    last = max(dump.collectives, key=lambda c: c.created, default=None)
    splits = dumps.describe_splits(rank, last)
    return f"{text}, in {_describe(last)}, where it {splits}" if splits else text


def _slowest(dumps: Dumps) -> str | None:
    """Nobody waits: the rank that has been doing the same thing longest."""
    dumps_with_state = [dump for dump in dumps.by_rank.values() if dump.state]
    if not dumps_with_state:
        return None
    slowest = max(dumps_with_state, key=lambda dump: dump.state["seconds"])
    return f"no rank waits for another; rank {slowest.state['rank']} {slowest.doing()}"


def _describe(collective: RecordedCollective | None) -> str:
    if collective is None:
        return "a send or receive, or a collective, that was not recorded"
    return collective.describe()


# ---- who waits for whom


Edge = tuple[RecordedCollective | None, set[int]]
"""A collective that a rank waits in, and the ranks that it waits for."""
Waits = dict[int, list[Edge]]
"""Rank that waits to its edges, the oldest collective first."""


def _waits(dumps: Dumps) -> Waits:
    waits: Waits = {}
    for rank, dump in dumps.by_rank.items():
        edges = _unfinished(dumps, rank, dump)
        if not edges and dump.blocked:
            # gloo doesn't record sends and receives; NCCL's record has no collectives of gloo
            if any("/pipelining/" in frame[0] for frame in dump.frames):
                peers = _stages(dumps, dump)
            else:
                peers = set(filter(dumps.idle, range(dumps.world)))
            if peers - {rank}:
                edges.append((None, peers - {rank}))
        if edges:
            waits[rank] = edges
    return waits


def _unfinished(dumps: Dumps, rank: int, dump: RankDump) -> list[Edge]:
    """The recorded collectives in which a rank waits for others."""
    edges: list[Edge] = []
    saves = dump.phase.startswith(SAVING)
    for c in sorted(dump.collectives, key=lambda c: c.created):
        if c.is_over or (c.group.description == CHECKPOINT_GROUP and not saves):
            continue
        peers = {r for r in c.group.ranks if r != rank and not _entered(dumps, r, c, rank)}
        if peers:
            edges.append((c, peers))
    return edges


def _entered(dumps: Dumps, rank: int, collective: RecordedCollective, by: int) -> bool:
    """Whether `rank` is in, or past, the collective in which `by` waits."""
    dump = dumps.by_rank.get(rank)
    if dump is None:
        return False
    if collective.peer is None:
        return dump.last(collective.group) >= collective.number
    if rank != collective.peer:
        return True
    prefix = {"send": "recv", "recv": "send"}[collective.op[:4]]
    return any(
        c.peer == by and c.group == collective.group and c.op.startswith(prefix) and not c.is_over
        for c in dump.collectives
    )


def _stages(dumps: Dumps, dump: RankDump) -> set[int]:
    """Ranks of the same pipeline."""
    if dump.state["degrees"].get("pp") == dumps.world:
        return set(range(dumps.world))
    pipelines = [group.ranks for group in dump.groups.values() if group.description == "pp"]
    return {rank for ranks in pipelines for rank in ranks}


def _cause(dumps: Dumps, waits: Waits) -> tuple[int, list[int]] | None:
    """The rank to blame, and all ranks in the same position; None if the ranks wait in a circle."""
    targets = {peer for edges in waits.values() for _, peers in edges for peer in peers}
    # A rank may have begun a collective in advance and not be blocked in it.
    causes = sorted(targets - waits.keys()) or sorted(filter(dumps.idle, targets))
    if not causes:
        return None
    # A dead process explains most, then a rank that wrote its position, then one without an answer.
    dead = [r for r in causes if not dumps.silent.get(r, "gave").startswith("gave")]
    cause = min(dead or [r for r in causes if r in dumps.by_rank] or causes)
    return cause, [r for r in causes if (r in dumps.silent) == (cause in dumps.silent)]


def _blame(dumps: Dumps, waits: Waits, cause: int, same: list[int]) -> str:
    """The sentence: the first collective that `cause` did not enter, the ranks that wait there, and
    what `cause` does instead.
    """
    waits_for_cause = [(c, r) for r, edges in waits.items() for c, peers in edges if cause in peers]
    first = min((c for c, _ in waits_for_cause if c), key=lambda c: c.created, default=None)
    waiting_ranks = [r for c, r in waits_for_cause if first is None or (c and _is_same(c, first))]
    text = f"did not enter {_describe(first)}, where {name_ranks(waiting_ranks)} "
    text += "waits" if len(waiting_ranks) == 1 else "wait"
    splits = dumps.describe_splits(waiting_ranks[0], first)
    if splits:
        text += f" (rank {waiting_ranks[0]} {splits})"
    if cause in dumps.silent:
        return f"{dumps.describe_silent(same)}, and {text}"
    dump = dumps.by_rank[cause]
    if dump.phase.startswith(DATA):
        return f"rank {cause} {dump.doing()}, and {text}"
    return f"{name_ranks(same)} {text}: it {dump.doing()}"


def _is_same(a: RecordedCollective, b: RecordedCollective) -> bool:
    return (a.group, a.number) == (b.group, b.number)
