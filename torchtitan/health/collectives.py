"""Collectives that disagree between ranks, found alike in a hang and in a rehearsal.

Imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.utils.activity import Exchange


class Group(NamedTuple):
    """A process group."""

    ranks: tuple[int, ...]
    description: str
    """Its name in words: `tp`, `all ranks = dp_shard`."""
    at: str = ""
    """The line that created it, if known."""
    name: str = ""
    """torch's name, if known. Not unique: groups split off together share it."""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank entered."""

    group: Group
    number: int
    """Sequence number in its group; sends and receives are counted separately."""
    op: str
    tensors: str
    """Types and shapes of the inputs."""
    at: str
    """The line that called it."""
    root: int | None = None
    """The root's index in the group."""
    during: str = ""
    """Phase of a rehearsal; empty in a run."""

    @property
    def call(self) -> tuple[str, str, int | None]:
        """The properties that must be equal on all members of the group."""
        return self.op, self.tensors, self.root

    def describe(self) -> str:
        """`all_reduce #4 of tp (float32 [8]; ranks 0-1)`."""
        tensors = f"{self.tensors}; " if self.tensors else ""
        group = self.group
        return (
            f"{self.op} #{self.number} of {group.description} ({tensors}{name_ranks(group.ranks)})"
        )

    @property
    def when_and_where(self) -> str:
        """When and where the collective was called, as the end of a clause."""
        during = f" during the {self.during}" if self.during else ""
        return f"{during}, at {self.at}"


def describe_group(description: str, ranks: tuple[int, ...], degrees: Mapping[str, int]) -> str:
    """torch's description of a group in words.

    Args:
        degrees: degree of each mesh axis, by name.
    """
    if description == "default_pg":  # also the group of an axis that spans all ranks
        axes = [axis for axis, degree in degrees.items() if degree == len(ranks) > 1]
        return " = ".join(["all ranks", *axes])
    return description.removeprefix("mesh_")


def minority(
    by_rank: Mapping[int, object], key: Callable[..., object]
) -> tuple[list[int], list[int]] | None:
    """The smallest set of ranks with equal values, and the largest; None if all values are equal.

    Of two sets of equal size, the set with the lowest rank is the larger.
    """
    sets: dict[object, list[int]] = {}
    for rank, value in sorted(by_rank.items()):
        sets.setdefault(key(value), []).append(rank)
    if len(sets) < 2:
        return None
    few, *_, most = sorted(sets.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return few, most


def different_calls(few: list[int], rare: Collective, most: list[int], other: Collective) -> str:
    """The sentence about ranks that entered `rare` where most entered `other`."""
    root = other_root = ""
    if rare.root != other.root:
        root = _root(rare)
        other_root = _root(other)
    return (
        f"{name_ranks(few)} entered {rare.describe()}{root}{rare.when_and_where}, "
        f"where {name_ranks(most)} "
        f"entered {other.op} ({other.tensors}){other_root}, at {other.at}"
    )


def _root(collective: Collective) -> str:
    if collective.root is None:
        return ""
    return f" of root {collective.group.ranks[collective.root]}"


class UnevenExchange(NamedTuple):
    """A rank sends a different number of experts' rows than the receiver expects."""

    sender: int
    receiver: int
    text: str


def uneven_exchange(exchanges: Mapping[int, Iterable[Exchange]]) -> UnevenExchange | None:
    """The first exchange of experts' rows whose ranks disagree.

    Args:
        exchanges: rank to its exchanges.
    """
    by_exchange: dict[tuple[int, ...], dict[int, Exchange]] = {}
    for rank, local_exchanges in exchanges.items():
        for exchange in local_exchanges:
            by_exchange.setdefault((exchange.number, *exchange.ranks), {})[rank] = exchange
    for (number, *ranks), by_rank in sorted(by_exchange.items()):
        for sender, sender_exchange in sorted(by_rank.items()):
            for receiver, other in sorted(by_rank.items()):
                num_rows = sender_exchange.sent[ranks.index(receiver)]
                expected = other.expected[ranks.index(sender)]
                if num_rows != expected:
                    text = (
                        f"rank {sender} sends {num_rows} rows to rank {receiver}, which expects "
                        f"{expected}, in exchange #{number} of experts' rows among "
                        f"{name_ranks(ranks)}"
                    )
                    return UnevenExchange(sender, receiver, text)
    return None


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2-5`."""
    sorted_ranks = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in sorted_ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' * (len(sorted_ranks) > 1)} {text}"
