"""Places of a model's weights in Hugging Face's files, as data. Imports no torch.

Each of our tensors is one of their tensors, an `HFSlice` of one, or a stack of several (a list)
along a new first dimension. Where several of our tensors are slices of one of theirs, the slices
must cover it, so that it can be written again.

    "norm.weight": "model.norm.weight"
    "layers.0.moe.experts.w1": [f"model.layers.0.mlp.experts.{e}.gate_proj.weight" for e in ...]
    "layers.0.moe.experts.w1": HFSlice("...gate_up_proj", take=(0, 1), of=2, dim=2, transposed=True)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class HFSlice:
    """The slice of one of Hugging Face's tensors that is our tensor. By default, all of it
    unchanged.

    It is read in the order of the attributes: take entries along a dimension, drop a dimension,
    swap the last two.
    """

    name: str
    take: tuple[int, int] | None = None
    """Entries `[first, end)` of every `of` along `dim`: `(0, 1)` of 2 takes the even columns, `(0,
    512)` of 2048 rows takes the first 512.
    """
    of: int = 1
    """Period of `take`; it divides the size of `dim`."""
    dim: int = 0
    """The dimension of their tensor that `take` counts in."""
    dropped: int | None = None
    """A dimension of size 1 that ours doesn't have."""
    transposed: bool = False
    """Whether the last two dimensions of ours are swapped in theirs."""
    buffer: bool = False
    """Whether our tensor is a buffer. All files store it in its own dtype, whatever the weights'.
    """
    copies: tuple[str, ...] = ()
    """Further names of the same tensor, which are written but not read."""

    def __post_init__(self) -> None:
        first, end = self.take or (0, self.of)
        assert 0 <= first < end <= self.of, f"{self.name}: can't take {self.take} of {self.of}"
        both = self.dropped is not None and self.transposed
        assert not both, f"{self.name}: dropping a dimension and swapping two is not supported"

    @property
    def width(self) -> int:
        """Number of entries taken from each period."""
        return self.take[1] - self.take[0] if self.take else self.of

    def entry(self, index: int) -> int:
        """Index in their tensor of our entry `index`."""
        first = self.take[0] if self.take else 0
        return index // self.width * self.of + first + index % self.width

    def before(self, entry: int) -> int:
        """Number of entries taken before their index `entry`."""
        first = self.take[0] if self.take else 0
        rounds, remainder = divmod(entry, self.of)
        return rounds * self.width + min(max(remainder - first, 0), self.width)

    def our_shape(self, theirs: Sequence[int]) -> tuple[int, ...]:
        """Our tensor's shape, from theirs."""
        shape = list(theirs)
        if self.take:
            shape[self.dim] = shape[self.dim] // self.of * self.width
        return self.to_ours(shape)

    def their_shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """Their tensor's shape, from ours."""
        shape = list(self.to_theirs(ours, 1))
        if self.take:
            shape[self.dim] = shape[self.dim] // self.width * self.of
        return tuple(shape)

    def to_ours(self, theirs: Sequence[T]) -> tuple[T, ...]:
        """Reorder one value per dimension (sizes, slices) from their dimensions to ours."""
        order = list(theirs)
        if self.dropped is not None:
            del order[self.dropped]
        if self.transposed:
            order[-2:] = reversed(order[-2:])
        return tuple(order)

    def to_theirs(self, ours: Sequence[T], dropped: T) -> tuple[T, ...]:
        """Reorder one value per dimension from our dimensions to theirs.

        Args:
            dropped: the value for the dimension that ours lacks.
        """
        order = list(ours)
        if self.transposed:
            order[-2:] = reversed(order[-2:])
        if self.dropped is not None:
            order.insert(self.dropped, dropped)
        return tuple(order)


Theirs = str | HFSlice | list[str] | list[HFSlice]
HFNames = dict[str, Theirs]
"""Our tensor's name to where it is in Hugging Face's files: parameters, and the buffers they store.
"""


def is_stack(theirs: Theirs) -> bool:
    """Whether our tensor stacks several of theirs."""
    return isinstance(theirs, list)


def hf_slices(theirs: Theirs) -> list[HFSlice]:
    """The slices of their tensors that our tensor consists of."""
    entries: Iterable[str | HFSlice] = theirs if isinstance(theirs, list) else [theirs]
    return [HFSlice(entry) if isinstance(entry, str) else entry for entry in entries]


def is_buffer(theirs: Theirs) -> bool:
    """Whether our tensor is a buffer."""
    return any(hf_slice.buffer for hf_slice in hf_slices(theirs))


def parameters_of(names: HFNames) -> list[str]:
    """Our names of the parameters in `names`."""
    return [ours for ours, theirs in names.items() if not is_buffer(theirs)]
