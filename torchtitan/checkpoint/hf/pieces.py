"""The mapping between the boxes of our tensors and of Hugging Face's, as `HFSlice`s declare it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan.checkpoint.hf.stored import Box, shape_of
from torchtitan.models.hf_names import HFNames, HFSlice, hf_slices, is_stack


def whole(shape: Sequence[int]) -> Box:
    """The box that is a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def blocks(box: Box, elements: int) -> Iterator[Box]:
    """A box, cut along its first dimensions into boxes of at most `elements` elements."""
    if not box:
        yield box
        return
    first, others = box[0], box[1:]
    row = math.prod(shape_of(others))
    if row > elements:
        for i in range(first.start, first.stop):
            yield from ((slice(i, i + 1), *block) for block in blocks(others, elements))
        return
    rows = max(1, elements // max(row, 1))
    for start in range(first.start, first.stop, rows):
        yield (slice(start, min(start + rows, first.stop)), *others)


def within(inner: Box, outer: Box) -> Box:
    """The position of a box within another that contains it."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def their_box(part: HFSlice, ours: Box) -> Box:
    """The smallest box of theirs that contains a nonempty box of ours."""
    box = list(part.to_theirs(ours, slice(0, 1)))
    if part.take:
        taken = box[part.dim]
        step = part.of if part.width == 1 else None
        box[part.dim] = slice(part.entry(taken.start), part.entry(taken.stop - 1) + 1, step)
    return tuple(box)


def our_box(part: HFSlice, theirs: Box) -> Box:
    """The box of ours that a box of theirs contains."""
    box = list(theirs)
    if part.take:
        taken = box[part.dim]
        box[part.dim] = slice(part.before(taken.start), part.before(taken.stop))
    return part.to_ours(box)


def to_ours(part: HFSlice, value: Tensor, box: Box) -> Tensor:
    """A box of ours, given the values of its `their_box`; a view where possible."""
    if part.take:
        taken = part.to_theirs(box, slice(0, 1))[part.dim]
        entries = _entries(part, taken) - part.entry(taken.start)
        if len(entries) < value.shape[part.dim]:
            value = value.index_select(part.dim, entries)
    if part.dropped is not None:
        value = value.squeeze(part.dropped)
    return value.transpose(-2, -1) if part.transposed else value


def into_theirs(part: HFSlice, value: Tensor, target: Tensor, box: Box) -> None:
    """Write `value`, the `our_box` of `box`, into `target`, the values of `box` of theirs."""
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
    """`part.entry` of each index in `taken`, as a tensor."""
    index = torch.arange(taken.start, taken.stop)
    return index // part.width * part.of + part.entry(0) + index % part.width


# ---- which tensors are made from which


@dataclass(frozen=True)
class Contribution:
    """The contribution of one of our tensors to one of Hugging Face's."""

    ours: str
    part: HFSlice
    index: int | None
    """Index in our stack; None if ours isn't a stack."""

    def box(self, theirs: Box) -> Box:
        """The box of ours that contributes to a box of theirs."""
        our_slice = our_box(self.part, theirs)
        return our_slice if self.index is None else (slice(self.index, self.index + 1), *our_slice)

    def write(self, value: Tensor, target: Tensor, theirs: Box) -> None:
        """Write `value`, our values of `box(theirs)`, into `target`, the values of `theirs`."""
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
        shapes: the shapes of our tensors, by our names.
        dtypes: the dtypes to write them in; buffers are always written in fp32.
    """
    tensors: dict[str, HFTensor] = {}
    for ours, theirs in names.items():
        stacked = is_stack(theirs)
        for i, part in enumerate(hf_slices(theirs)):
            part_shape = shapes[ours][1:] if stacked else shapes[ours]
            shape = part.their_shape(part_shape)
            dtype = torch.float32 if part.buffer else dtypes[ours]
            source = Contribution(ours, part, i if stacked else None)
            for name in (part.name, *part.copies):
                tensor = tensors.setdefault(name, HFTensor(shape, dtype))
                assert (tensor.shape, tensor.dtype) == (shape, dtype), f"{name} has two shapes"
                tensor.sources.append(source)
    for name, tensor in tensors.items():
        _check_covered(name, tensor)
    return tensors


def _check_covered(name: str, tensor: HFTensor) -> None:
    """Check that each element has exactly one source."""
    first = tensor.sources[0].part
    taken: list[int] = []
    for source in tensor.sources:
        part = source.part
        assert (part.dim, part.of) == (first.dim, first.of), f"{name} is cut in two ways"
        taken += range(*(part.take or (0, part.of)))
    assert sorted(taken) == list(range(first.of)), f"{name}: its parts don't cover it once"
