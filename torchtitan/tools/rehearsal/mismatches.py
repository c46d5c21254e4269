"""Checks that ranks make the same groups, enter the same collectives, and receive what others send.
Imports no torch.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from operator import attrgetter
from typing import Literal, NamedTuple

from torchtitan.health.collectives import (
    Group,
    different_calls,
    minority,
    name_ranks,
    uneven_exchange,
)
from torchtitan.tools.rehearsal.events import Creation, Entry, Message, Post, RankRecord
from torchtitan.tools.rehearsal.rank_sample import RankSample
from torchtitan.utils.wording import plural

_CALL = attrgetter("call")
_CALL_AND_LINE = attrgetter("call", "at")
"""Compared first: among equal calls, only the line tells which one is left out."""
_ALIKE = 4
"""Collectives count as left out if this many after them are equal, or all that are left. Before an
exception, one suffices.
"""
Kind = Literal["error", "groups", "collectives", "messages", "exchanges", "circle", "data"]


class Fault(NamedTuple):
    """A reason why the ranks would hang, or fail."""

    kind: Kind
    rank: int
    """The rank to blame: the one that differs from most."""
    text: str


@dataclass
class Counts:
    """Numbers of compared groups and calls."""

    groups: int = 0
    """Groups of several ranks, over the whole cluster."""
    collectives: int = 0
    """Collectives of all rehearsed ranks."""
    messages: int = 0
    exchanges: int = 0


def errors(records: Mapping[int, RankRecord]) -> list[Fault]:
    """Ranks that did not reach the end."""
    ranks_of = defaultdict(list)
    for rank, record in records.items():
        if record.error:
            ranks_of[record.error].append(rank)
    return [
        Fault("error", ranks[0], f"{name_ranks(ranks)} {error}")
        for error, ranks in ranks_of.items()
    ]


# ---- groups


def check_groups(records: Mapping[int, RankRecord]) -> list[Fault]:
    """All ranks must create the same groups in the same order, members or not."""
    ends = [len(record.creations) for record in records.values() if record.error]
    creations = zip_longest(*(record.creations for record in records.values()))
    for i, by_rank in enumerate(islice(creations, min(ends, default=None))):
        calls: dict[int, Creation | None] = dict(zip(records, by_rank, strict=True))
        sides = minority(calls, lambda c: c and (c.ranks, c.description))
        if sides:
            few, most = sides
            text = (
                f"{name_ranks(few)} {_creates(few, calls[few[0]], i)}, where {name_ranks(most)} "
                f"{_creates(most, calls[most[0]], i)}"
            )
            return [Fault("groups", few[0], text)]
    return []


def _creates(ranks: Sequence[int], creation: Creation | None, index: int) -> str:
    verb = "creates" if len(ranks) == 1 else "create"
    if creation is None:
        return f"{verb} only {plural(index, 'group')}"
    members = name_ranks(creation.ranks)
    return f"{verb} group #{index + 1} {creation.description} ({members}), at {creation.at}"


def all_groups(record: RankRecord) -> list[tuple[tuple[int, ...], int]]:
    """Every group of several ranks that is created: its ranks, and its slot on them."""
    slots: defaultdict[int, int] = defaultdict(int)
    groups = []
    for creation in record.creations:
        if len(creation.ranks) > 1:
            groups.append((creation.ranks, slots[creation.ranks[0]]))
        for rank in creation.ranks:
            slots[rank] += 1
    return groups


# ---- collectives


def check_collectives(
    records: Mapping[int, RankRecord], sample: RankSample, counts: Counts
) -> list[Fault]:
    """All members of each group must enter the same collectives in the same order."""
    entries: dict[int, defaultdict[int, list[Entry]]] = {}
    for rank, record in records.items():
        entries[rank] = defaultdict(list)
        for event in record.collectives:
            entries[rank][event.slot].append(event)
            counts.collectives += 1
    first = records[min(records)]
    groups = all_groups(first)
    counts.groups = len(groups)
    comparisons: set[tuple[int, frozenset[int]]] = set()
    faults: dict[int, Fault] = {}
    for ranks, slot in sorted(groups, key=lambda group: -sum(rank in records for rank in group[0])):
        stand_ins = {rank: sample.stand_in(rank) for rank in ranks}
        key = slot, frozenset(stand_ins.values())
        if key in comparisons or slot in faults:
            continue
        comparisons.add(key)
        lists = {rank: entries[by][slot] for rank, by in stand_ins.items()}
        ends = [len(entries[by][slot]) for by in key[1] if records[by].error]
        group = Group(ranks, first.groups[slot].description)
        fault = _first_difference(lists, group, min(ends, default=None))
        if fault:
            faults[slot] = fault
    return [fault for _, fault in sorted(faults.items())]


def _first_difference(
    lists: Mapping[int, list[Entry]], group: Group, limit: int | None
) -> Fault | None:
    """The fault of lists that differ.

    Args:
        limit: number of collectives after which an exception ended a rank.
    """
    unique = {id(events): events for events in lists.values()}.values()
    calls = [[event.call for event in events] for events in unique]
    if limit is None and all(other == calls[0] for other in calls):
        return None
    for key in (_CALL_AND_LINE, _CALL):
        omissions = partial(_count_omissions, key=key, alike=_ALIKE if limit is None else 1)
        for i, events in enumerate(islice(zip_longest(*lists.values()), limit)):
            by_rank = dict(zip(lists, events, strict=True))
            if sides := minority(by_rank, lambda event, key=key: event and key(event)):
                few, most = sides
                theirs, usual = lists[few[0]], lists[most[0]]
                text = _omission(few, theirs, most, usual, i, group, omissions)
                if not text and key is _CALL:
                    rare, other = (replace(x[i], group=group) for x in (theirs, usual))
                    text = different_calls(few, rare, most, other)
                if text:
                    return Fault("collectives", few[0], text)
                break
    return None


def _omission(
    few: list[int],
    theirs: list[Entry],
    most: list[int],
    usual: list[Entry],
    i: int,
    group: Group,
    omissions: Callable[[Sequence[Entry], Sequence[Entry]], int],
) -> str:
    """The sentence about two lists of collectives that differ from index `i` on, if one of them
    continues like the other after more collectives.

    Args:
        group: the compared group; the lists may come from ranks that stand in for its members.
        omissions: number of collectives at the beginning of a list that a shorter one lacks.
    """
    if count := omissions(usual[i:], theirs[i:]):
        expected = replace(usual[i], group=group)
        nor = _more(count, "nor")
        waits = "waits" if len(most) == 1 else "wait"
        return (
            f"{name_ranks(few)} did not enter {expected.describe()} during the {expected.during}"
            f"{nor}, where {name_ranks(most)} {waits}, at {expected.at}{_last(few, theirs[:i])}"
        )
    if count := omissions(theirs[i:], usual[i:]):
        actual = replace(theirs[i], group=group)
        return (
            f"{name_ranks(few)} entered {actual.describe()}{actual.when_and_where}"
            f"{_more(count, 'and')}, which {name_ranks(most)} did not enter"
            f"{_last(most, usual[:i])}"
        )
    return ""


def _count_omissions(
    longer: Sequence[Entry], shorter: Sequence[Entry], *, key: Callable[[Entry], object], alike: int
) -> int:
    """Number of collectives at the beginning of `longer` without which it continues like `shorter`;
    0: it doesn't.

    Args:
        key: what equal collectives have in common.
        alike: number of collectives, or all that are left, that must be equal.
    """
    now = [key(event) for event in shorter[:alike]]
    calls = [key(event) for event in longer]
    counts = range(1, len(calls) + 1)
    return next((count for count in counts if calls[count : count + alike] == now), 0)


def _more(count: int, conjunction: str) -> str:
    """The collectives that follow the first one, if there are any."""
    return f", {conjunction} the {plural(count - 1, 'collective')} after it" if count > 1 else ""


def _last(ranks: Sequence[int], entries: Sequence[Entry]) -> str:
    """The last collective that the ranks entered alike, if there is one."""
    if not entries:
        return ""
    last = entries[-1]
    whose = "its" if len(ranks) == 1 else "their"
    return f"; {whose} last one there is #{last.number} {last.op}, at {last.at}"


# ---- sends and receives


class _Letter(NamedTuple):
    """A message, and the post that it is part of."""

    message: Message
    post: Post


def check_messages(
    records: Mapping[int, RankRecord], sample: RankSample, counts: Counts
) -> list[Fault]:
    """Each send must have its receive on the other rank, with the same size and communicator."""
    faults = []
    mails = {rank: _mail(record) for rank, record in records.items()}
    for rank, record in records.items():
        for (slot, other, sends), letters in mails[rank].items():
            ranks = record.groups[slot].ranks
            peer = ranks[other]
            theirs = mails[sample.stand_in(peer)].get((slot, ranks.index(rank), not sends), [])
            if sends:
                counts.messages += len(letters)
                faults.append(_message_fault(rank, peer, letters, theirs))
            elif not theirs:
                faults.append(_message_fault(peer, rank, [], letters))
    return [fault for fault in faults if fault][:1]


def _mail(record: RankRecord) -> dict[tuple[int, int, bool], list[_Letter]]:
    """Letters by slot, index of the other rank in its group, and whether they are sent."""
    mails = defaultdict(list)
    for post in record.posts:
        ranks = record.groups[post.slot].ranks
        for message in post.messages:
            key = post.slot, ranks.index(message.peer), message.sends
            mails[key].append(_Letter(message, post))
    return mails


def _message_fault(
    source: int, target: int, sends: list[_Letter], receives: list[_Letter]
) -> Fault | None:
    for number, (send, receive) in enumerate(zip(sends, receives, strict=False), 1):
        what = f"rank {source} sends message #{number} ({send.message.tensors}) to rank {target}"
        here = f"{what}, at {send.post.at}"
        there = f"at {receive.post.at}"
        if send.message.tensors != receive.message.tensors:
            text = f"{here}, which receives {receive.message.tensors}, {there}"
            return Fault("messages", source, text)
        if send.post.pair != receive.post.pair:
            ways = ("over the group's communicator", "over the two ranks' communicator")
            way = ways[send.post.pair]
            text = f"{here}, {way}, but it is received {ways[receive.post.pair]}, {there}"
            return Fault("messages", source, text)
    pairs = min(len(sends), len(receives))
    if len(sends) == len(receives):
        return None
    surplus = max(sends, receives, key=len)[pairs]
    what = f"message #{pairs + 1} ({surplus.message.tensors})"
    when = f"during the {surplus.post.during}, at {surplus.post.at}"
    if len(sends) > pairs:
        text = f"rank {source} sends {what} to rank {target} {when}, but rank {target} receives "
        return Fault("messages", target, f"{text}only {pairs} from it")
    text = f"rank {target} receives {what} from rank {source} {when}, but rank {source} sends "
    return Fault("messages", source, f"{text}only {pairs} to it")


# ---- experts


def check_exchanges(records: Mapping[int, RankRecord], counts: Counts) -> list[Fault]:
    """A rank must expect the number of rows that the other one sends.

    These splits are the only sizes that depend on data. A rehearsal makes them unequal.
    """
    exchanges = {rank: record.exchanges for rank, record in records.items()}
    for rank_exchanges in exchanges.values():
        for exchange in rank_exchanges:
            counts.exchanges += len(records.keys() & exchange.ranks)
    uneven = uneven_exchange(exchanges)
    return [Fault("exchanges", uneven.sender, uneven.text)] if uneven else []
