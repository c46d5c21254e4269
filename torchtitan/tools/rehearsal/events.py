"""What one rank does that other ranks wait for. Imports no torch.

A group is known by its slot: its place among the groups that a rank is a member of, in the order of
their creation. Slot 0 is all ranks. If all ranks create the same groups, a slot means the same on
all of them: the rank's own group along one axis, say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan.utils.activity import Exchange


class Creation(NamedTuple):
    """A call that creates a process group, which all ranks must make."""

    ranks: tuple[int, ...]
    """Its members, which need not include this rank."""
    description: str
    at: str
    """Python line."""


class Group(NamedTuple):
    """A group that the rank is a member of."""

    ranks: tuple[int, ...]
    description: str
    """In words: `tp`, `all ranks`."""
    at: str


class Collective(NamedTuple):
    """A collective that the rank entered."""

    slot: int
    number: int
    """In its group, from 1. Sends and receives don't count, as in the Flight Recorder."""
    op: str
    tensors: str
    """Type and shape of what it passes; rows whose number depends on the data have `any`."""
    bytes: int
    root: int | None
    """Index of a root in the group."""
    at: str
    during: str
    """Part of the rehearsal."""


class Message(NamedTuple):
    """A send or a receive."""

    sends: bool
    peer: int
    """Global rank."""
    tensors: str
    bytes: int


class Post(NamedTuple):
    """Sends and receives that the rank posts as one batch; they begin and end together."""

    slot: int
    number: int
    """Of this rank's posts, from 0."""
    messages: tuple[Message, ...]
    pair: bool
    """They travel over a communicator of two ranks, as those that are posted alone do, not over
    that of the group.
    """
    at: str
    during: str


class Wait(NamedTuple):
    """The rank can't continue before a post has ended."""

    post: int
    at: str


class Read(NamedTuple):
    """A place where the host reads a value from a tensor."""

    at: str
    shared: bool
    """All ranks are known to read the same value: it is a sum, or a maximum, over all of them."""


Event = Collective | Post | Wait


@dataclass
class Record:
    """What one rank did."""

    rank: int
    groups: list[Group] = field(default_factory=list)
    """By slot."""
    creations: list[Creation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    reads: dict[Read, int] = field(default_factory=dict)
    """How often each place read a value."""
    own_reads: list[tuple[int, str]] = field(default_factory=list)
    """(number of events before, place) of each read of a value that other ranks may not share."""
    exchanges: list[Exchange] = field(default_factory=list)
    """Rows that it sent to experts, and expected from them."""
    error: str | None = None
    """The exception that ended it, with its place."""
    loop: str | None = None
    """The line of a loop that its values never end."""
    broadcasts: list[Any] = field(default_factory=list)
    """Objects that it told all others, in order."""
    layers: tuple[int, int] = (1, 1)
    """How many layers of its stages ran, and how many there are."""
    parts: tuple[int, int] = (0, 0)
    """Into which a checkpoint cuts the tensors of the layers that ran, and those of other modules,
    over all ranks.
    """
    cpu_seconds: float = 0.0
    """Of its process."""
    memory: int = 0
    """Most bytes that its process held."""
    metadata: float = 0.0
    """Bytes of a checkpoint's metadata for each part."""

    @property
    def collectives(self) -> Sequence[Collective]:
        return [event for event in self.events if isinstance(event, Collective)]

    @property
    def posts(self) -> Sequence[Post]:
        return [event for event in self.events if isinstance(event, Post)]
