"""Whether ranks can wait for each other in a circle: runs their collectives, sends and receives.

They run in the strictest order that a backend can impose; one that waits less can't hang either:

- A collective blocks its rank until all members of the group have entered it.
- Sends and receives are posted without blocking, but on one communicator they run one after the
  other in the order of posting, as on a stream of NCCL. A send or receive ends only together with
  its other end (no buffers), and a batch when all of it has.
- A message that is posted alone uses the communicator of the two ranks; batches and collectives
  use the group's.
- Waiting for a post blocks.
"""

from collections import defaultdict, deque
from collections.abc import Mapping

from torchtitan.tools.rehearsal.events import Entered, Event, Message, Post, Record, Wait
from torchtitan.tools.rehearsal.mismatches import Fault

_Stream = tuple[int, int]
"""(slot, other rank); the rank is -1 for the group's communicator."""


class _Rank:
    """The position of a rank in its events."""

    def __init__(self, record: Record):
        self.record = record
        self.position = 0
        self.streams: defaultdict[_Stream, deque[tuple[Post, list[Message]]]] = defaultdict(deque)
        """Posts that have not ended, each with the messages that haven't."""
        self.done: set[int] = set()

    @property
    def event(self) -> Event | None:
        """The next event, which may block; None at the end."""
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
    """The ranks whose peers were all rehearsed; the others are like one of them."""
    closed = []
    for rank, record in records.items():
        peers = {message.peer for post in record.posts for message in post.messages}
        if peers <= records.keys():
            closed.append(rank)
    return sorted(closed)


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
            others = members[event.group.ranks]
            if not all(_has_entered(ranks[other], event) for other in others):
                break
            for other in others:
                ranks[other].position += 1
            woken |= set(others) - {rank}
    return woken


def _has_entered(state: _Rank, event: Entered) -> bool:
    own = state.event
    if not isinstance(own, Entered) or (own.slot, own.number) != (event.slot, event.number):
        return False
    return not state.streams[event.slot, -1]


def _match(rank: int, stream: _Stream, ranks: Mapping[int, _Rank]) -> set[int]:
    """End messages with both ends at the head of their streams; the ranks that may continue."""
    woken = set[int]()
    todo = deque([(rank, stream)])
    while todo:
        own, at = todo.popleft()
        queue = ranks[own].streams[at]
        if not queue:
            continue
        slot, peer = at
        mirrored = slot, own if peer >= 0 else -1
        left = queue[0][1]
        for message in list(left):
            others = ranks[message.peer].streams[mirrored]
            mirror = _other_end(own, message, others[0][1]) if others else None
            if message not in left or mirror is None:
                continue
            left.remove(message)
            others[0][1].remove(mirror)
            for who, where, line in ((own, at, queue), (message.peer, mirrored, others)):
                if line and not line[0][1]:
                    ranks[who].done.add(line.popleft()[0].number)
                    woken.add(who)
                    todo.append((who, where))
    return woken


def _other_end(own: int, message: Message, candidates: list[Message]) -> Message | None:
    for one in candidates:
        if one.peer == own and one.sends != message.sends:
            return one
    return None


# ---- words


def _circle(
    stuck: Mapping[int, _Rank], members: Mapping[tuple[int, ...], list[int]]
) -> list[tuple[int, _Rank]]:
    """Ranks that wait for each other: each for the next, the last for the first."""
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
    if isinstance(event, Entered) and state.streams[event.slot, -1]:
        return state.streams[event.slot, -1][0][0]
    return None


def _waits_for(
    rank: int, stuck: Mapping[int, _Rank], members: Mapping[tuple[int, ...], list[int]]
) -> set[int]:
    state = stuck[rank]
    head = _head(state)
    if head:
        return {m.peer for m in state.streams[state.stream(head)][0][1]}
    event = state.event
    assert isinstance(event, Entered)
    others = members[event.group.ranks]
    return {other for other in others if other in stuck and not _has_entered(stuck[other], event)}


def _doing(state: _Rank, ranks: Mapping[int, _Rank]) -> str:
    event = state.event
    head = _head(state)
    if head:
        left = state.streams[state.stream(head)][0][1]
        waits = []
        for m in left:
            verb = "send to" if m.sends else "receive from"
            waits.append(f"to {verb} rank {m.peer} ({m.tensors})")
        what = " and ".join(waits)
        group = state.record.groups[head.slot].description
        return f"waits {what} in {group}, posted at {head.at}"
    assert isinstance(event, Entered)
    return f"waits in {event.describe()}, at {event.at}"
