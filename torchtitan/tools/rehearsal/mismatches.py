"""Checks that ranks make the same groups, enter the same collectives, and receive what others send.
Imports no torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
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

_ALIKE = 4
"""Collectives count as left out if this many after them are equal, or all that are left."""
Kind = Literal["error", "loop", "groups", "collectives", "messages", "exchanges", "circle", "data"]


class Fault(NamedTuple):
    """A reason why the ranks would hang, or fail."""

    kind: Kind
    rank: int
    """The rank to blame: the one that differs from most."""
    text: str


@dataclass
class Counts:
    """Numbers of compared groups, calls and bytes."""

    groups: int = 0
    """Groups of several ranks, over the whole cluster."""
    collectives: int = 0
    """Collectives of all rehearsed ranks."""
    messages: int = 0
    exchanges: int = 0
    bytes: int = 0
    """Bytes that the rehearsed ranks send, and pass to collectives."""


def errors(records: Mapping[int, RankRecord]) -> list[Fault]:
    """Ranks that did not reach the end."""
    faults = []
    for rank, record in records.items():
        if record.error:
            faults.append(Fault("error", rank, f"rank {rank} raised {record.error}"))
        if record.loop:
            text = (
                f"rank {rank} loops without end at {record.loop}: the loop waits for a "
                "tensor's value to change, and the values of a rehearsal are made up. Bound the "
                "number of its turns"
            )
            faults.append(Fault("loop", rank, text))
    return faults


# ---- groups


def check_groups(records: Mapping[int, RankRecord]) -> list[Fault]:
    """All ranks must create the same groups in the same order, members or not."""
    creations = zip_longest(*(record.creations for record in records.values()))
    for i, by_rank in enumerate(creations):
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
            counts.bytes += event.bytes
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
        fault = _first_difference(lists, Group(ranks, first.groups[slot].description))
        if fault:
            faults[slot] = fault
    return [fault for _, fault in sorted(faults.items())]


def _first_difference(lists: Mapping[int, list[Entry]], group: Group) -> Fault | None:
    unique = {id(events): events for events in lists.values()}.values()
    calls = [[event.call for event in events] for events in unique]
    if all(other == calls[0] for other in calls):
        return None
    for i, events in enumerate(zip_longest(*lists.values())):
        by_rank = dict(zip(lists, events, strict=True))
        sides = minority(by_rank, lambda event: event and event.call)
        if sides:
            few, most = sides
            text = _difference(few, lists[few[0]], most, lists[most[0]], i, group)
            return Fault("collectives", few[0], text)
    return None


def _difference(
    few: list[int], theirs: list[Entry], most: list[int], usual: list[Entry], i: int, group: Group
) -> str:
    """The sentence about two lists of collectives that differ from index `i` on.

    Args:
        group: the compared group; the lists may come from ranks that stand in for its members.
    """
    if count := _count_omissions(usual[i:], theirs[i:]):
        expected = replace(usual[i], group=group)
        during = f" during the {expected.during}"
        waits = "waits" if len(most) == 1 else "wait"
        return (
            f"{name_ranks(few)} did not enter {expected.describe()}{during}{_more(count, 'nor')}, "
            f"where {name_ranks(most)} {waits}, at {expected.at}{_last(few, theirs[:i])}"
        )
    if count := _count_omissions(theirs[i:], usual[i:]):
        actual = replace(theirs[i], group=group)
        return (
            f"{name_ranks(few)} entered {actual.describe()}{actual.when_and_where}"
            f"{_more(count, 'and')}, which {name_ranks(most)} did not enter"
            f"{_last(most, usual[:i])}"
        )
    rare, other = (replace(events[i], group=group) for events in (theirs, usual))
    return different_calls(few, rare, most, other)


def _count_omissions(longer: Sequence[Entry], shorter: Sequence[Entry]) -> int:
    """Number of collectives at the beginning of `longer` without which it continues like `shorter`;
    0: it doesn't.
    """
    now = [event.call for event in shorter[:_ALIKE]]
    calls = [event.call for event in longer]
    counts = range(1, len(calls) + 1)
    return next((count for count in counts if calls[count : count + _ALIKE] == now), 0)


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


@dataclass
class _Mail:
    """Messages to and from one peer in one group."""

    sends: list[_Letter] = field(default_factory=list)
    receives: list[_Letter] = field(default_factory=list)


def check_messages(
    records: Mapping[int, RankRecord], sample: RankSample, counts: Counts
) -> list[Fault]:
    """Each send must have its receive on the other rank, with the same size and communicator."""
    faults = []
    mails = {rank: _mail(record) for rank, record in records.items()}
    for rank, record in records.items():
        for (slot, other), mail in mails[rank].items():
            ranks = record.groups[slot].ranks
            peer = ranks[other]
            theirs = mails[sample.stand_in(peer)].get((slot, ranks.index(rank)), _Mail())
            counts.messages += len(mail.sends)
            counts.bytes += sum(send.message.bytes for send in mail.sends)
            faults.append(_message_fault(rank, peer, mail.sends, theirs.receives))
            if not theirs.sends:
                faults.append(_message_fault(peer, rank, [], mail.receives))
    return [fault for fault in faults if fault][:1]


def _mail(record: RankRecord) -> dict[tuple[int, int], _Mail]:
    """The mail with each index in the group of each slot."""
    mails: defaultdict[tuple[int, int], _Mail] = defaultdict(_Mail)
    for post in record.posts:
        ranks = record.groups[post.slot].ranks
        for message in post.messages:
            peer_mail = mails[post.slot, ranks.index(message.peer)]
            (peer_mail.sends if message.sends else peer_mail.receives).append(
                _Letter(message, post)
            )
    return dict(mails)


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
