"""Why a run stopped moving, in one sentence: which rank blocks the rest, and where. Imports no
torch.

Ranks are the nodes of a graph. A rank points to those it waits for: members of a group that have
not entered the collective it is in, or the other end of a send or receive. The cause is a rank that
others wait for and that waits for nobody. How many ranks it blocks indirectly doesn't matter.
"""

import itertools
from collections.abc import Callable, Mapping
from signal import SIGKILL, SIGTERM, Signals

from torchtitan.health.rank_dumps import Case, Collective, Group, Witness, name_ranks
from torchtitan.utils.activity import CHECKPOINT_GROUP, DATA, SAVING, Exchange

_EQUAL_SIZES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def diagnose(case: Case, exits: Mapping[int, int] | None = None) -> str:
    """Name the cause in one sentence: the first explanation that fits.

    Args:
        exits: exit codes of ranks whose processes have ended, where known.
    """
    for rank, code in (exits or {}).items():
        if (
            code < 0 and code != -SIGTERM and rank in case.silent
        ):  # torchrun ends the other ranks with SIGTERM
            case.silent[rank] = killed(code)
    explanations: tuple[Callable[[Case], str | None], ...] = (
        _uneven,
        _raised,
        _mismatch,
        _blocked,
        _silent,
        _slowest,
    )
    return next(
        (text for explain in explanations if (text := explain(case))), "no collective is unfinished"
    )


def killed(code: int) -> str:
    """A process's negative exit code in words."""
    hint = " (by hand, or out of memory)" if code == -SIGKILL else ""
    return f"was killed by {Signals(-code).name}{hint}"


# ---- explanations, the most certain first


def _uneven(case: Case) -> str | None:
    """A rank sends other numbers of experts' rows than their receiver expects. What follows is
    undefined.
    """
    exchanges: dict[tuple[int, ...], dict[int, Exchange]] = {}
    for rank, witness in case.witnesses.items():
        for exchange in witness.exchanges:
            exchanges.setdefault((exchange.number, *exchange.ranks), {})[rank] = exchange
    for (number, *ranks), by_rank in sorted(exchanges.items()):
        for i, j in itertools.product(range(len(ranks)), repeat=2):
            sender = by_rank.get(ranks[i])
            receiver = by_rank.get(ranks[j])
            if (
                sender
                and receiver
                and (sent := sender.sent[j]) != (expected := receiver.expected[i])
            ):
                doing = case.witnesses[ranks[j]].doing().removeprefix("it ")
                return (
                    f"rank {ranks[i]} sends {sent} rows to rank {ranks[j]}, which "
                    f"expects {expected}, in the exchange "
                    f"#{number} of experts' rows among {name_ranks(ranks)}; rank {ranks[j]} {doing}"
                )
    return None


def _raised(case: Case) -> str | None:
    """A rank raised an exception of its own."""
    failed = {r: w.state["error"] for r, w in case.witnesses.items() if w.state.get("error")}
    causes = [rank for rank, error in failed.items() if error["cause"]]
    if not causes:
        return None
    rank = min(causes, key=lambda r: case.witnesses[r].state["time"])
    what = f"{failed[rank]['type']}: {failed[rank]['text']}"
    witness = case.witnesses[rank]
    return f"rank {rank} raised {what}, in step {witness.state['step']}, at {witness.place()}"


def _mismatch(case: Case) -> str | None:
    """The first collective for which the ranks of a group made different calls."""
    calls: dict[tuple[Group, int], dict[int, Collective]] = {}
    for rank, witness in case.witnesses.items():
        for c in witness.collectives:
            if c.peer is None:
                calls.setdefault((c.group, c.number), {})[rank] = c
    for _, by_rank in sorted(
        calls.items(), key=lambda item: min(c.created for c in item[1].values())
    ):
        kinds: dict[tuple[str, str], list[int]] = {}
        for rank, c in sorted(by_rank.items()):
            sized = c.op.replace("_base", "").startswith(_EQUAL_SIZES)
            kinds.setdefault((c.op, c.tensors if sized else ""), []).append(rank)
        if len(kinds) > 1:
            few, *_, most = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))
            one = by_rank[few[0]]
            other = by_rank[most[0]]
            return (
                f"{name_ranks(few)} entered {case.describe(one)}, at {one.at}, "
                f"where {name_ranks(most)} entered {other.op} ({other.tensors}), at {other.at}"
            )
    return None


def _blocked(case: Case) -> str | None:
    """Ranks wait in a collective that another rank did not enter."""
    waits = _waits(case)
    if not waits:
        return None
    if (cause := _cause(case, waits)) is None:
        ring = "; ".join(
            f"rank {r} in {case.describe(edges[0][0])}" for r, edges in sorted(waits.items())[:4]
        )
        return (
            "the ranks wait for each other, because they called collectives in different "
            f"orders: {ring}"
        )
    return _accuse(case, waits, *cause)


def _silent(case: Case) -> str | None:
    """Ranks wrote nothing, and no rank is known to wait for them."""
    if not case.silent:
        return None
    text = case.describe_silent(case.silent)
    if lost := [r for r, w in case.witnesses.items() if w.state.get("error")]:
        witness = case.witnesses[min(lost)]
        text += (
            f"; rank {min(lost)} lost the connection in step {witness.state['step']}, at "
            f"{witness.place()}"
        )
        last = max(witness.collectives, key=lambda c: c.created, default=None)
        if splits := case.describe_splits(min(lost), last):
            text += f", in {case.describe(last)}, where it {splits}"
    return text


def _slowest(case: Case) -> str | None:
    """Nobody waits: the rank that has been doing the same thing longest."""
    known = [w for w in case.witnesses.values() if w.state]
    if not known:
        return None
    slowest = max(known, key=lambda witness: witness.state["seconds"])
    return (
        f"no rank waits for another; rank {slowest.state['rank']} "
        f"{slowest.doing().removeprefix('it ')}"
    )


# ---- who waits for whom


Waits = dict[int, list[tuple[Collective | None, set[int]]]]
"""For each rank that waits: in which collectives, oldest first, and for which ranks."""


def _waits(case: Case) -> Waits:
    waits: Waits = {}
    for rank, witness in case.witnesses.items():
        edges: list[tuple[Collective | None, set[int]]] = []
        for c in sorted(witness.collectives, key=lambda c: c.created):
            if c.done or (
                c.group.description == CHECKPOINT_GROUP and not witness.phase.startswith(SAVING)
            ):
                continue
            if peers := {r for r in c.group.ranks if r != rank and not _entered(case, r, c, rank)}:
                edges.append((c, peers))
        if (
            not edges and witness.blocked
        ):  # gloo doesn't record sends and receives; NCCL's record holds nothing of gloo
            in_pipeline = any(
                "/pipelining/" in frame[0] for frame in witness.state["threads"]["MainThread"]
            )
            peers = (
                _stages(case, witness) if in_pipeline else set(filter(case.idle, range(case.world)))
            )
            if peers - {rank}:
                edges.append((None, peers - {rank}))
        if edges:
            waits[rank] = edges
    return waits


def _entered(
    case: Case,
    rank: int,
    collective: Collective,
    by: int,
) -> bool:
    """Whether `rank` is in, or past, the collective in which `by` waits."""
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
    """Ranks of the same pipeline."""
    if witness.state["degrees"].get("pp") == case.world:
        return set(range(case.world))
    return {
        r
        for group in witness.groups.values()
        if group.description == "mesh_pp"
        for r in group.ranks
    }


def _cause(case: Case, waits: Waits) -> tuple[int, list[int]] | None:
    """The rank to blame, and those in the same position; None if the ranks wait in a circle."""
    awaited = {peer for edges in waits.values() for _, peers in edges for peer in peers}
    # A rank may have begun a collective in advance and not be blocked in it.
    causes = sorted(awaited - waits.keys()) or sorted(filter(case.idle, awaited))
    if not causes:
        return None
    # A dead process explains most, then a rank that said where it is, then one that gave no answer.
    dead = [r for r in causes if not case.silent.get(r, "gave").startswith("gave")]
    cause = min(dead or [r for r in causes if r in case.witnesses] or causes)
    return cause, [r for r in causes if (r in case.silent) == (cause in case.silent)]


def _accuse(
    case: Case,
    waits: Waits,
    cause: int,
    same: list[int],
) -> str:
    """The sentence: the first collective that `cause` is missing from, who waits there, and what it
    does instead.
    """
    missing = [(c, r) for r, edges in waits.items() for c, peers in edges if cause in peers]
    first = min((c for c, _ in missing if c), key=lambda c: c.created, default=None)
    waiting = [
        r
        for c, r in missing
        if first is None or (c and (c.group, c.number) == (first.group, first.number))
    ]
    absent = (
        f"did not enter {case.describe(first)}, where {name_ranks(waiting)} "
        f"wait{'s' * (len(waiting) == 1)}"
    )
    if splits := case.describe_splits(waiting[0], first):
        absent += f" (rank {waiting[0]} {splits})"
    if cause in case.silent:
        return f"{case.describe_silent(same)}, and {absent}"
    witness = case.witnesses[cause]
    if witness.phase.startswith(DATA):
        return f"rank {cause} {witness.doing().removeprefix('it ')}, and {absent}"
    return f"{name_ranks(same)} {absent}: {witness.doing()}"
