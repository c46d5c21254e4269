"""Which of our tensors Hugging Face's are made from, and how their boxes map to ours: what an
`HFSlice` declares.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan.checkpoint.hf.stored import Box
from torchtitan.models.hf_names import HFNames, HFSlice, hf_slices, is_stack


def whole(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def blocks(box: Box, elements: int) -> Iterator[Box]:
    """A box, cut along its first dimensions into boxes of at most so many elements."""
    if not box:
        yield box
        return
    first, *others = box
    row = math.prod(part.stop - part.start for part in others)
    if row > elements:
        for i in range(first.start, first.stop):
            yield from ((slice(i, i + 1), *rest) for rest in blocks(tuple(others), elements))
        return
    rows = max(1, elements // max(row, 1))
    for start in range(first.start, first.stop, rows):
        yield (slice(start, min(start + rows, first.stop)), *others)


def within(inner: Box, outer: Box) -> Box:
    """Where a box is in another that holds it."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def their_box(part: HFSlice, ours: Box) -> Box:
    """The smallest box of theirs that holds a box of ours, which isn't empty."""
    box = list(part.to_theirs(ours, slice(0, 1)))
    if part.take:
        taken = box[part.dim]
        step = part.of if part.width == 1 else None
        box[part.dim] = slice(part.entry(taken.start), part.entry(taken.stop - 1) + 1, step)
    return tuple(box)


def our_box(part: HFSlice, theirs: Box) -> Box:
    """The box of ours that a box of theirs holds."""
    box = list(theirs)
    if part.take:
        taken = box[part.dim]
        box[part.dim] = slice(part.before(taken.start), part.before(taken.stop))
    return part.to_ours(box)


def to_ours(part: HFSlice, value: Tensor, box: Box) -> Tensor:
    """A box of ours, from `their_box` of it; a view where that can be one."""
    if part.take:
        taken = part.to_theirs(box, slice(0, 1))[part.dim]
        entries = _entries(part, taken) - part.entry(taken.start)
        if len(entries) < value.shape[part.dim]:
            value = value.index_select(part.dim, entries)
    if part.dropped is not None:
        value = value.squeeze(part.dropped)
    return value.transpose(-2, -1) if part.transposed else value


def into_theirs(part: HFSlice, value: Tensor, target: Tensor, box: Box) -> None:
    """Write `our_box` of a box of theirs, `target`, where it belongs there."""
    value = value.transpose(-2, -1) if part.transposed else value
    if part.dropped is not None:
        value = value.unsqueeze(part.dropped)
    if not part.take:
        target.copy_(value)
        return
    start = box[part.dim].start
    first = part.before(start)
    entries = _entries(part, slice(first, first + value.shape[part.dim])) - start
    if part.width == 1:
        target[_along(part, slice(int(entries[0]), None, part.of))].copy_(value)
    else:
        target.index_copy_(part.dim, entries, value.to(target.dtype))


def _along(part: HFSlice, taken: slice) -> Box:
    return (*(slice(None) for _ in range(part.dim)), taken)


def _entries(part: HFSlice, taken: slice) -> Tensor:
    """`part.entry` of each of `taken`."""
    index = torch.arange(taken.start, taken.stop)
    return index // part.width * part.of + part.entry(0) + index % part.width


# ---- which tensors are made from which


@dataclass(frozen=True)
class Contribution:
    """What one of our tensors is of one of Hugging Face's."""

    ours: str
    part: HFSlice
    index: int | None
    """In the stack that ours is; None: it is none."""

    def box(self, theirs: Box) -> Box:
        """The box of ours that a box of theirs is made from."""
        own = our_box(self.part, theirs)
        return own if self.index is None else (slice(self.index, self.index + 1), *own)

    def write(self, value: Tensor, target: Tensor, theirs: Box) -> None:
        """Write `box(theirs)` of ours to where it is in that box, `target`."""
        into_theirs(self.part, value if self.index is None else value.squeeze(0), target, theirs)


@dataclass(frozen=True)
class HFTensor:
    """One of Hugging Face's tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[Contribution] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def arrange(
    names: HFNames, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, HFTensor]:
    """Hugging Face's tensors by name, in the order in which ours are.

    Args:
        shapes: of ours, by our names.
        dtypes: of ours, as they are to be written; a buffer is written in fp32.
    """
    found: dict[str, HFTensor] = {}
    for ours, theirs in names.items():
        stacked = is_stack(theirs)
        for i, part in enumerate(hf_slices(theirs)):
            own = shapes[ours][1:] if stacked else shapes[ours]
            shape = part.their_shape(own)
            dtype = torch.float32 if part.buffer else dtypes[ours]
            source = Contribution(ours, part, i if stacked else None)
            for name in (part.name, *part.copies):
                tensor = found.setdefault(name, HFTensor(shape, dtype))
                assert (tensor.shape, tensor.dtype) == (shape, dtype), f"{name} has two shapes"
                tensor.sources.append(source)
    for name, tensor in found.items():
        _check_covered(name, tensor)
    return found


def _check_covered(name: str, tensor: HFTensor) -> None:
    """Each element must have one source."""
    first = tensor.sources[0].part
    taken: list[int] = []
    for source in tensor.sources:
        part = source.part
        assert (part.dim, part.of) == (first.dim, first.of), f"{name} is cut in two ways"
        taken += range(*(part.take or (0, part.of)))
    assert sorted(taken) == list(range(first.of)), f"{name}: its parts don't cover it once"
