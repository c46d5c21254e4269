"""Where a model's weights are in Hugging Face's files, as data. Imports no torch.

A name maps one of our tensors to one of theirs, to a `Part` of one, or to a list of such, which
ours stacks along a new first dimension. The parts that several of ours take of one of theirs must
cover it, so that it can be written again.

    "norm.weight": "model.norm.weight"
    "layers.0.moe.experts.w1": [f"model.layers.0.mlp.experts.{e}.gate_proj.weight" for e in ...]
    "layers.0.moe.experts.w1": Part("...gate_up_proj", take=(0, 1), of=2, dim=2, transposed=True)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """What of one of Hugging Face's tensors is ours. By default, all of it as it is.

    Read in the order of the attributes: take entries along a dimension, drop a dimension, swap the
    last two.
    """

    name: str
    take: tuple[int, int] | None = None
    """Entries `[first, end)` of every `of` along `dim`. Of columns that alternate, `(0, 1)` of 2
    are the even ones; of rows that follow one another, `(0, 512)` of 2048 are the first.
    """
    of: int = 1
    """The period of `take`, which divides the size of `dim`."""
    dim: int = 0
    """The dimension of theirs that `take` counts in."""
    dropped: int | None = None
    """A dimension of size 1 that ours doesn't have."""
    transposed: bool = False
    """Whether the last two dimensions of ours are swapped in theirs."""
    buffer: bool = False
    """Whether ours is a buffer, not a parameter. It has one dtype in all files: its own."""
    copies: tuple[str, ...] = ()
    """Further names of the same tensor, which are written but not read."""

    def __post_init__(self) -> None:
        first, end = self.take or (0, self.of)
        assert 0 <= first < end <= self.of, f"{self.name}: can't take {self.take} of {self.of}"
        both = self.dropped is not None and self.transposed
        assert not both, f"{self.name}: dropping a dimension and swapping two is not supported"

    @property
    def width(self) -> int:
        """How many of every `of` entries are taken."""
        return self.take[1] - self.take[0] if self.take else self.of

    def entry(self, index: int) -> int:
        """Which entry of theirs is the one of ours at `index`."""
        first = self.take[0] if self.take else 0
        return index // self.width * self.of + first + index % self.width

    def before(self, entry: int) -> int:
        """How many entries are taken before the one of theirs at `entry`."""
        first = self.take[0] if self.take else 0
        whole, rest = divmod(entry, self.of)
        return whole * self.width + min(max(rest - first, 0), self.width)

    def our_shape(self, theirs: Sequence[int]) -> tuple[int, ...]:
        """The shape of ours, given that of theirs."""
        shape = list(theirs)
        if self.take:
            shape[self.dim] = shape[self.dim] // self.of * self.width
        return self.to_ours(shape)

    def their_shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """The shape of theirs, given that of ours."""
        shape = list(self.to_theirs(ours, 1))
        if self.take:
            shape[self.dim] = shape[self.dim] // self.width * self.of
        return tuple(shape)

    def to_ours(self, theirs: Sequence[T]) -> tuple[T, ...]:
        """Something about each dimension of theirs, in the order of ours."""
        order = list(theirs)
        if self.dropped is not None:
            del order[self.dropped]
        if self.transposed:
            order[-2:] = reversed(order[-2:])
        return tuple(order)

    def to_theirs(self, ours: Sequence[T], dropped: T) -> tuple[T, ...]:
        """Something about each dimension of ours, in the order of theirs.

        Args:
            dropped: about the dimension that ours lacks.
        """
        order = list(ours)
        if self.transposed:
            order[-2:] = reversed(order[-2:])
        if self.dropped is not None:
            order.insert(self.dropped, dropped)
        return tuple(order)


Theirs = str | Part | list[str] | list[Part]
HFNames = dict[str, Theirs]
"""Our names of parameters, and of the buffers that Hugging Face stores, to what they are there."""


def is_stack(theirs: Theirs) -> bool:
    """Whether ours stacks several of theirs."""
    return isinstance(theirs, list)


def parts_of(theirs: Theirs) -> list[Part]:
    """The parts that are one tensor for us."""
    parts: Iterable[str | Part] = theirs if isinstance(theirs, list) else [theirs]
    return [Part(part) if isinstance(part, str) else part for part in parts]


def is_buffer(theirs: Theirs) -> bool:
    """Whether ours is a buffer."""
    return any(part.buffer for part in parts_of(theirs))


def parameters_of(names: HFNames) -> list[str]:
    """Our names of the parameters in `names`."""
    return [ours for ours, theirs in names.items() if not is_buffer(theirs)]
