"""Checks that ranks can't wait for each other in a circle: runs their collectives, sends, receives.

They run in the strictest order that a backend can impose; a backend that waits less can't hang
either:

- A collective blocks its rank until all members of the group have entered it.
- Sends and receives are posted without blocking, but on one communicator they run one after the
  other in the order of posting, as on a stream of NCCL. A send or receive ends only together with
  its other end (no buffers), and a batch when all its messages have ended.
- A message that is posted alone uses the communicator of the two ranks; batches and collectives
  use the group's.
- Waiting for a post blocks.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchtitan.tools.rehearsal.events import Entry, Event, Message, Post, RankRecord, Wait
from torchtitan.tools.rehearsal.mismatches import Fault

_Stream = tuple[int, int]
"""(slot, other rank); the rank is -1 for the group's communicator."""


class _OpenPost(NamedTuple):
    """A post that has not ended."""

    post: Post
    messages: list[Message]


class _Rank:
    """The position of a rank in its events."""

    def __init__(self, record: RankRecord):
        self.record = record
        self.position = 0
        self.streams: defaultdict[_Stream, deque[_OpenPost]] = defaultdict(deque)
        self.ended_posts: set[int] = set()
        """Numbers of posts that have ended."""

    @property
    def event(self) -> Event | None:
        """The next event, which may block; None at the end."""
        events = self.record.events
        return events[self.position] if self.position < len(events) else None

    def end_post(self, stream: deque[_OpenPost]) -> None:
        """End the first post of a stream if its messages have ended."""
        if stream and not stream[0].messages:
            self.ended_posts.add(stream.popleft().post.number)

    def has_entered(self, event: Entry) -> bool:
        current = self.event
        return (
            isinstance(current, Entry)
            and (current.slot, current.number) == (event.slot, event.number)
            and not self.streams[event.slot, -1]
        )

    @property
    def head(self) -> _OpenPost | None:
        """The oldest unfinished post of the stream that blocks this rank.

        None if only other ranks block it.
        """
        event = self.event
        if isinstance(event, Wait):
            post = next(post for post in self.record.posts if post.number == event.post)
            return self.streams[_stream(post)][0]
        if isinstance(event, Entry) and self.streams[event.slot, -1]:
            return self.streams[event.slot, -1][0]
        return None

    def doing(self) -> str:
        """The reason why it is blocked, in words."""
        head = self.head
        if head is None:
            event = self.event
            assert isinstance(event, Entry)
            return f"waits in {event.describe()}, at {event.at}"
        waits = [
            f"to {'send to' if message.sends else 'receive from'} rank {message.peer} "
            f"({message.tensors})"
            for message in head.messages
        ]
        group = self.record.groups[head.post.slot].description
        return f"waits {' and '.join(waits)} in {group}, posted at {head.post.at}"


def _stream(post: Post) -> _Stream:
    return post.slot, post.messages[0].peer if post.pair else -1


def check_circles(records: Mapping[int, RankRecord]) -> list[Fault]:
    """Run the rehearsed ranks against each other."""
    ranks = _Ranks(records)
    ranks.run()
    stuck = {rank for rank, state in ranks.states.items() if state.event is not None}
    if not stuck:
        return []
    circle = ranks.circle(stuck)[:4]
    text = "; ".join(f"rank {rank} {ranks.states[rank].doing()}" for rank in circle)
    return [Fault("circle", min(stuck), f"ranks wait for each other: {text}")]


class _Ranks:
    """The ranks whose peers were all rehearsed; the others are like one of them."""

    def __init__(self, records: Mapping[int, RankRecord]):
        self.states: dict[int, _Rank] = {}
        for rank, record in sorted(records.items()):
            peers = {message.peer for post in record.posts for message in post.messages}
            if peers <= records.keys():
                self.states[rank] = _Rank(record)
        self.members: dict[tuple[int, ...], list[int]] = {}
        for state in self.states.values():
            for group in state.record.groups:
                self.members[group.ranks] = [r for r in group.ranks if r in self.states]

    def run(self) -> None:
        """Run all ranks until they end or are stuck."""
        while sum(self._advance(rank) for rank in self.states):
            pass

    def _advance(self, rank: int) -> int:
        """Run a rank until it blocks; the number of messages and events that end."""
        state = self.states[rank]
        count = sum(self._match(rank, stream) for stream in list(state.streams))
        while (event := state.event) is not None:
            if isinstance(event, Post):
                state.streams[_stream(event)].append(_OpenPost(event, list(event.messages)))
            elif isinstance(event, Wait):
                if event.post not in state.ended_posts:
                    break
            else:
                others = [self.states[other] for other in self.members[event.group.ranks]]
                if not all(other.has_entered(event) for other in others):
                    break
                for other in others:
                    other.position += other is not state
            state.position += 1
            count += 1
        return count

    def _match(self, rank: int, stream: _Stream) -> int:
        """End messages with both ends at the head of their streams; their number."""
        slot, peer = stream
        state = self.states[rank]
        queue = state.streams[stream]
        count = 0
        for message in list(queue[0].messages) if queue else ():
            other = self.states[message.peer]
            others = other.streams[slot, rank if peer >= 0 else -1]
            mirror = _other_end(rank, message, others)
            if queue and message in queue[0].messages and mirror:
                queue[0].messages.remove(message)
                others[0].messages.remove(mirror)
                state.end_post(queue)
                other.end_post(others)
                count += 1
        return count

    def circle(self, stuck: set[int]) -> list[int]:
        """Ranks that wait for each other: each for the next, the last for the first."""
        rank = min(stuck)
        path = list[int]()
        while rank not in path:
            path.append(rank)
            rank = min(self._waits_for(rank) & stuck, default=rank)
        return path[path.index(rank) :]

    def _waits_for(self, rank: int) -> set[int]:
        state = self.states[rank]
        if state.head is not None:
            return {message.peer for message in state.head.messages}
        event = state.event
        assert isinstance(event, Entry)
        others = self.members[event.group.ranks]
        return {other for other in others if not self.states[other].has_entered(event)}


def _other_end(rank: int, message: Message, line: Sequence[_OpenPost]) -> Message | None:
    """The other end of a message, if it is at the head of its stream."""
    for candidate in line[0].messages if line else ():
        if candidate.peer == rank and candidate.sends != message.sends:
            return candidate
    return None
