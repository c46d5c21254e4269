"""Whether ranks can wait for each other in a circle: their collectives, sends and receives, run in
order.

The strictest order that a backend can impose, so one that waits less can't hang either:

- a collective blocks its rank until all members of the group have entered it;
- sends and receives are posted without blocking, but those of one communicator run one after the
other, in the order
  of posting, as on a stream of NCCL. A send or receive ends only together with its other end (no
  buffers). A batch ends when all of it has;
- messages that are posted alone use the communicator of the two ranks, those of a mixed batch, and
collectives, that
  of the group;
- waiting for a post blocks.
"""

from collections import defaultdict, deque
from collections.abc import Mapping

from torchtitan.tools.rehearsal.events import Collective, Message, Post, Record, Wait
from torchtitan.tools.rehearsal.mismatches import Fault, describe

_Stream = tuple[int, int]
"""(slot, other rank; -1 for the group's communicator)."""


class _Rank:
    """How far a rank is."""

    def __init__(self, record: Record):
        self.record = record
        self.position = 0
        self.streams: defaultdict[_Stream, deque[tuple[Post, list[Message]]]] = defaultdict(deque)
        """Posts that have not ended, each with the messages that haven't."""
        self.done: set[int] = set()

    @property
    def event(self) -> Collective | Post | Wait | None:
        """What it does next, or waits in."""
        events = self.record.events
        return events[self.position] if self.position < len(events) else None

    def stream(self, post: Post) -> _Stream:
        return post.slot, post.messages[0].peer if post.pair else -1


def check_circles(records: Mapping[int, Record]) -> list[Fault]:
    """Run the rehearsed ranks against each other."""
    closed = _with_their_peers(records)
    ranks = {rank: _Rank(records[rank]) for rank in closed}
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in closed:
        for group in records[rank].groups:
            members[group.ranks] = [r for r in group.ranks if r in closed]
    active = deque(closed)
    while active:
        rank = active.popleft()
        active.extend(other for other in _advance(rank, ranks, members) if other not in active)
    stuck = {rank: state for rank, state in ranks.items() if state.event is not None}
    if not stuck:
        return []
    text = "; ".join(
        f"rank {rank} {_doing(state, ranks)}" for rank, state in _circle(stuck, members)[:4]
    )
    return [Fault("circle", min(stuck), f"ranks wait for each other: {text}")]


def _with_their_peers(records: Mapping[int, Record]) -> list[int]:
    """The ranks all of whose correspondents were rehearsed; the others are like one of them."""
    peers = {
        r: {m.peer for post in record.posts for m in post.messages} for r, record in records.items()
    }
    return sorted(rank for rank, others in peers.items() if others <= records.keys())


def _advance(
    rank: int, ranks: Mapping[int, _Rank], members: Mapping[tuple[int, ...], list[int]]
) -> set[int]:
    """Run a rank until it blocks; the ranks that may now continue."""
    state = ranks[rank]
    woken = set[int]()
    while (event := state.event) is not None:
        if isinstance(event, Post):
            state.streams[state.stream(event)].append((event, list(event.messages)))
            state.position += 1
            woken |= _match(rank, state.stream(event), ranks)
        elif isinstance(event, Wait):
            if event.post not in state.done:
                break
            state.position += 1
        else:
            others = members[state.record.groups[event.slot].ranks]
            if not all(_has_entered(ranks[other], event) for other in others):
                break
            for other in others:
                ranks[other].position += 1
            woken |= set(others) - {rank}
    return woken


def _has_entered(state: _Rank, event: Collective) -> bool:
    own = state.event
    free = not state.streams[event.slot, -1]
    return (
        isinstance(own, Collective)
        and (own.slot, own.number) == (event.slot, event.number)
        and free
    )


def _match(rank: int, stream: _Stream, ranks: Mapping[int, _Rank]) -> set[int]:
    """End what has both ends at the head of its streams; the ranks that may now continue."""
    woken = set[int]()
    todo = deque([(rank, stream)])
    while todo:
        own, at = todo.popleft()
        queue = ranks[own].streams[at]
        if not queue:
            continue
        _, left = queue[0]
        for message in list(left):
            there = at[0], own if at[1] >= 0 else -1
            if message not in left or not (others := ranks[message.peer].streams[there]):
                continue
            mirror = next(
                (m for m in others[0][1] if m.peer == own and m.sends != message.sends), None
            )
            if mirror is None:
                continue
            left.remove(message)
            others[0][1].remove(mirror)
            for who, where, line in ((own, at, queue), (message.peer, there, others)):
                if line and not line[0][1]:
                    ranks[who].done.add(line.popleft()[0].number)
                    woken.add(who)
                    todo.append((who, where))
    return woken


# ---- words


def _circle(
    stuck: Mapping[int, _Rank], members: Mapping[tuple[int, ...], list[int]]
) -> list[tuple[int, _Rank]]:
    """Ranks of which each waits for the next, and the last for the first."""
    rank = min(stuck)
    path = list[int]()
    while rank not in path:
        path.append(rank)
        rank = min(_waits_for(rank, stuck, members) & stuck.keys(), default=rank)
    return [(r, stuck[r]) for r in path[path.index(rank) :]]


def _head(state: _Rank) -> Post | None:
    """The oldest unfinished post on the stream that this rank is blocked on; None if only other
    ranks block it.
    """
    event = state.event
    if isinstance(event, Wait):
        posted = next(p for p in state.record.posts if p.number == event.post)
        return state.streams[state.stream(posted)][0][0]
    if isinstance(event, Collective) and state.streams[event.slot, -1]:
        return state.streams[event.slot, -1][0][0]
    return None


def _waits_for(
    rank: int, stuck: Mapping[int, _Rank], members: Mapping[tuple[int, ...], list[int]]
) -> set[int]:
    state = stuck[rank]
    if head := _head(state):
        return {m.peer for m in state.streams[state.stream(head)][0][1]}
    event = state.event
    assert isinstance(event, Collective)
    others = members[state.record.groups[event.slot].ranks]
    return {other for other in others if other in stuck and not _has_entered(stuck[other], event)}


def _doing(state: _Rank, ranks: Mapping[int, _Rank]) -> str:
    event = state.event
    if head := _head(state):
        left = state.streams[state.stream(head)][0][1]
        what = " and ".join(
            f"to {'send to' if m.sends else 'receive from'} rank {m.peer} ({m.tensors})"
            for m in left
        )
        group = state.record.groups[head.slot].description
        return f"waits {what} in {group}, posted at {head.at}"
    assert isinstance(event, Collective)
    return f"waits in {describe(event, state.record.groups[event.slot])}, at {event.at}"
