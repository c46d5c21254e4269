"""Whether ranks make the same groups, enter the same collectives, and receive what others send.
Imports no torch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchtitan.health.rank_dumps import name_ranks
from torchtitan.tools.rehearsal.events import Collective, Group, Message, Post, Record
from torchtitan.tools.rehearsal.rank_sample import Cast
from torchtitan.utils.activity import Exchange

_ALIKE = 4
"""Equal collectives after one that differs by which it counts as left out."""
Kind = Literal["error", "loop", "groups", "collectives", "messages", "exchanges", "circle", "data"]


class Fault(NamedTuple):
    """Why the ranks would hang, or fail."""

    kind: Kind
    rank: int
    """The rank to blame: the one that differs from most."""
    text: str


@dataclass
class Counts:
    """What was compared."""

    groups: int = 0
    """Of several ranks, over the whole cluster."""
    collectives: int = 0
    """Over all rehearsed ranks."""
    messages: int = 0
    exchanges: int = 0
    bytes: int = 0
    """That the rehearsed ranks pass to collectives, and send."""


def describe(event: Collective, group: Group) -> str:
    """As the diagnosis of a hang describes it."""
    what = f"{event.tensors}; " if event.tensors else ""
    return f"{event.op} #{event.number} of {group.description} ({what}{name_ranks(group.ranks)})"


def errors(records: Mapping[int, Record]) -> list[Fault]:
    """Ranks that did not reach the end."""
    faults = []
    for rank, record in records.items():
        if record.error:
            faults.append(Fault("error", rank, f"rank {rank} raised {record.error}"))
        if record.loop:
            text = (
                f"rank {rank} loops without end at {record.loop}: the loop waits for a "
                "tensor's value to change, and "
                "the values of a rehearsal are made up. Bound the number of its turns"
            )
            faults.append(Fault("loop", rank, text))
    return faults


# ---- groups


def check_groups(records: Mapping[int, Record]) -> list[Fault]:
    """All ranks must create the same groups in the same order, members or not."""
    length = max(len(record.creations) for record in records.values())
    for i in range(length):
        made = {
            r: record.creations[i] if i < len(record.creations) else None
            for r, record in records.items()
        }
        few, most = _sides(made, key=lambda c: c and (c.ranks, c.description))
        if few:
            one = made[few[0]]
            other = made[most[0]]
            texts = [
                f"creates group #{i + 1} {c.description} ({name_ranks(c.ranks)}), at {c.at}"
                if c
                else f"creates only {i} groups"
                for c in (one, other)
            ]
            return [
                Fault(
                    "groups",
                    few[0],
                    f"{name_ranks(few)} {texts[0]}, where {name_ranks(most)} {texts[1]}",
                )
            ]
    return []


def all_groups(record: Record) -> list[tuple[tuple[int, ...], int]]:
    """Every group of several ranks that is created: its ranks, and its slot on them."""
    slots: defaultdict[int, int] = defaultdict(int)
    found = []
    for creation in record.creations:
        found.append((creation.ranks, slots[creation.ranks[0]]))
        for rank in creation.ranks:
            slots[rank] += 1
    return [(ranks, slot) for ranks, slot in found if len(ranks) > 1]


# ---- collectives


def check_collectives(records: Mapping[int, Record], cast: Cast, counts: Counts) -> list[Fault]:
    """All members of each group of the cluster must enter the same collectives in the same
    order.
    """
    entered = {rank: _by_slot(record.collectives) for rank, record in records.items()}
    counts.collectives = sum(len(record.collectives) for record in records.values())
    counts.bytes += sum(event.bytes for record in records.values() for event in record.collectives)
    groups = all_groups(records[min(records)])
    counts.groups = len(groups)
    compared: set[tuple[int, frozenset[int]]] = set()
    faults: dict[int, Fault] = {}
    for ranks, slot in sorted(groups, key=lambda group: -sum(rank in records for rank in group[0])):
        stand_ins = {rank: cast.stands_for(rank) for rank in ranks}
        key = slot, frozenset(stand_ins.values())
        if key in compared or slot in faults:
            continue
        compared.add(key)
        lists = {rank: entered[by].get(slot, []) for rank, by in stand_ins.items()}
        if fault := _first_difference(
            lists, Group(ranks, records[min(records)].groups[slot].description, "")
        ):
            faults[slot] = fault
    return [fault for _, fault in sorted(faults.items())]


def _by_slot(events: Iterable[Collective]) -> dict[int, list[Collective]]:
    found: dict[int, list[Collective]] = {}
    for event in events:
        found.setdefault(event.slot, []).append(event)
    return found


def _first_difference(lists: Mapping[int, list[Collective]], group: Group) -> Fault | None:
    different = {
        id(events): [_call(event) for event in events] for events in lists.values()
    }.values()
    if all(calls == next(iter(different)) for calls in different):
        return None
    for i in range(max(map(len, lists.values()))):
        at = {rank: events[i] if i < len(events) else None for rank, events in lists.items()}
        few, most = _sides(at, key=_call)
        if not few:
            continue
        one = at[few[0]]
        other = at[most[0]]
        theirs, usual = ([_call(e) for e in lists[side[0]][i:]] for side in (few, most))
        if other is not None and _begins(usual[1:], theirs):
            last = lists[few[0]][i - 1] if i else None
            before = (
                f"; its last one there is #{last.number} {last.op}, at {last.at}" if last else ""
            )
            text = (
                f"{name_ranks(few)} did not enter {describe(other, group)} during the "
                f"{other.during}, "
                f"where {name_ranks(most)} waits, at {other.at}{before}"
            )
        elif one is not None and _begins(theirs[1:], usual):
            text = (
                f"{name_ranks(few)} entered {describe(one, group)} during the "
                f"{one.during}, at {one.at}, "
                f"which {name_ranks(most)} did not enter"
            )
        else:
            assert one is not None
            assert other is not None
            root = [
                f" of root {group.ranks[e.root]}" if e.root != r.root and e.root is not None else ""
                for e, r in ((one, other), (other, one))
            ]
            text = (
                f"{name_ranks(few)} entered {describe(one, group)}{root[0]} during the "
                f"{one.during}, at {one.at}, "
                f"where {name_ranks(most)} entered {other.op} "
                f"({other.tensors}){root[1]}, at {other.at}"
            )
        return Fault("collectives", few[0], text)
    return None


def _begins(later: Sequence[object], now: Sequence[object]) -> bool:
    """Whether `now` continues like `later`: what stands before `later` was left out."""
    return list(now[:_ALIKE]) == list(later[:_ALIKE])


def _call(event: Collective | None) -> tuple[str, str, int | None] | None:
    """What must be equal on all members of a group."""
    return event and (event.op, event.tensors, event.root)


def _sides(
    by_rank: Mapping[int, object], key: Callable[..., object]
) -> tuple[list[int], list[int]]:
    """The ranks that differ from most, and most; empty if all agree. Of two equal sides, the lowest
    rank's is right.
    """
    kinds: dict[object, list[int]] = {}
    for rank, value in sorted(by_rank.items()):
        kinds.setdefault(key(value), []).append(rank)
    if len(kinds) < 2:
        return [], []
    few, *_, most = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return few, most


# ---- sends and receives


class _Sent(NamedTuple):
    message: Message
    post: Post


def check_messages(records: Mapping[int, Record], cast: Cast, counts: Counts) -> list[Fault]:
    """Each send of a rank must have its receive on the other, of the same size and over the same
    communicator.
    """
    faults = []
    seen: set[tuple[int, int, int, int]] = set()
    lists = {rank: _messages(record) for rank, record in records.items()}
    for rank, record in records.items():
        for (slot, other), (sends, _) in lists[rank].items():
            ranks = record.groups[slot].ranks
            counts.messages += len(sends)
            counts.bytes += sum(sent.message.bytes for sent in sends)
            stand_in = cast.stands_for(ranks[other])
            own = ranks.index(rank)
            receives = lists[stand_in].get((slot, own), ([], []))[1]
            seen.add((slot, stand_in, own, other))
            faults += _unmatched(rank, ranks[other], sends, receives)
        for (slot, other), (_, receives) in lists[rank].items():
            ranks = record.groups[slot].ranks
            stand_in = cast.stands_for(ranks[other])
            sends = lists[stand_in].get((slot, ranks.index(rank)), ([], []))[0]
            if not sends and receives:
                faults += _unmatched(ranks[other], rank, sends, receives)
    return faults[:1]


def _messages(record: Record) -> dict[tuple[int, int], tuple[list[_Sent], list[_Sent]]]:
    """Sends to, and receives from, each index in the group of each slot."""
    found: dict[tuple[int, int], tuple[list[_Sent], list[_Sent]]] = {}
    for post in record.posts:
        for message in post.messages:
            key = post.slot, record.groups[post.slot].ranks.index(message.peer)
            found.setdefault(key, ([], []))[0 if message.sends else 1].append(_Sent(message, post))
    return found


def _unmatched(
    source: int,
    target: int,
    sends: list[_Sent],
    receives: list[_Sent],
) -> list[Fault]:
    for number, (sent, received) in enumerate(zip(sends, receives, strict=False), 1):
        here = (
            f"rank {source} sends message #{number} ({sent.message.tensors}) to rank "
            f"{target}, at {sent.post.at}"
        )
        if sent.message.tensors != received.message.tensors:
            text = f"{here}, which receives {received.message.tensors}, at {received.post.at}"
            return [Fault("messages", source, text)]
        if sent.post.pair != received.post.pair:
            ways = ("over the group's communicator", "over that of the two ranks")
            text = (
                f"{here}, {ways[sent.post.pair]}, but it is received "
                f"{ways[received.post.pair]}, at {received.post.at}"
            )
            return [Fault("messages", source, text)]
    number = min(len(sends), len(receives))
    if len(sends) > number:
        left = sends[number]
        text = (
            f"rank {source} sends message #{number + 1} ({left.message.tensors}) to rank "
            f"{target} during the "
            f"{left.post.during}, at {left.post.at}, but rank {target} receives only "
            f"{number} from it"
        )
        return [Fault("messages", target, text)]
    if len(receives) > number:
        left = receives[number]
        text = (
            f"rank {target} receives message #{number + 1} ({left.message.tensors}) from "
            f"rank {source} during the "
            f"{left.post.during}, at {left.post.at}, but rank {source} sends only {number} to it"
        )
        return [Fault("messages", source, text)]
    return []


# ---- experts


def check_exchanges(records: Mapping[int, Record], counts: Counts) -> list[Fault]:
    """A rank must expect as many rows from another as that one sends.

    These splits are the only sizes that depend on data. A rehearsal makes them unequal.
    """
    by_number: dict[tuple[int, ...], dict[int, Exchange]] = {}
    for rank, record in records.items():
        for exchange in record.exchanges:
            by_number.setdefault((exchange.number, *exchange.ranks), {})[rank] = exchange
    for (number, *ranks), exchanges in sorted(by_number.items()):
        for i, sender in exchanges.items():
            for j, receiver in exchanges.items():
                counts.exchanges += 1
                sent = sender.sent[ranks.index(j)]
                expected = receiver.expected[ranks.index(i)]
                if sent != expected:
                    text = (
                        f"rank {i} sends {sent} rows to rank {j}, which expects {expected}, "
                        f"in exchange #{number}"
                    )
                    return [
                        Fault("exchanges", i, f"{text} of experts' rows among {name_ranks(ranks)}")
                    ]
    return []
