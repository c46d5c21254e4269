"""Events of one rank that other ranks wait for. Imports no torch.

A group is identified by its slot: its index among the groups that a rank is a member of, in the
order of creation. Slot 0 is all ranks. If all ranks create the same groups, a slot means the same
on all of them, for example the rank's own group along one axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan.health.collectives import Collective, Group
from torchtitan.utils.activity import Exchange


class Creation(NamedTuple):
    """A call that creates a process group, which all ranks must make."""

    ranks: tuple[int, ...]
    """Members of the group, which need not include this rank."""
    description: str
    at: str
    """Python line."""


@dataclass(frozen=True)
class Entry(Collective):
    """The rank's entry into a collective.

    Its number starts at 1 in each group. Rows whose number depends on the data have the size `any`.
    """

    slot: int = 0
    bytes: int = field(default=0, compare=False)
    """An object's may depend on the data."""


class Message(NamedTuple):
    """A send or a receive."""

    sends: bool
    peer: int
    """Global rank."""
    tensors: str
    bytes: int


class Post(NamedTuple):
    """A batch of sends and receives; they begin and end together."""

    slot: int
    number: int
    """Index among this rank's posts."""
    messages: tuple[Message, ...]
    pair: bool
    """Posted alone, and so over the communicator of the two ranks instead of the group's."""
    at: str
    during: str


class Wait(NamedTuple):
    """The rank can't continue before a post has ended."""

    post: int
    at: str


class Broadcast(NamedTuple):
    """Objects that a rank broadcast."""

    slot: int
    at: str
    objects: list[Any]


Event = Entry | Post | Wait


@dataclass
class RankRecord:
    """The calls of one rank, and its cost."""

    rank: int
    groups: list[Group] = field(default_factory=list)
    """The rank's groups, indexed by slot."""
    creations: list[Creation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    local_reads: list[tuple[int, str]] = field(default_factory=list)
    """Reads of values that other ranks may not share: number of earlier events, and place."""
    exchanges: list[Exchange] = field(default_factory=list)
    """Rows that the rank sent to experts, and expected from them."""
    error: str | None = None
    """What ended the rank early, with its line."""
    broadcasts: list[Broadcast] = field(default_factory=list)
    """Broadcasts of objects that the rank took part in, in order."""

    @property
    def collectives(self) -> Sequence[Entry]:
        return [event for event in self.events if isinstance(event, Entry)]

    @property
    def posts(self) -> Sequence[Post]:
        return [event for event in self.events if isinstance(event, Post)]
