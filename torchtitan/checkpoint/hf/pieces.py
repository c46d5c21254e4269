"""The mapping between boxes of our tensors and boxes of Hugging Face's, declared by `HFSlice`s."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan.checkpoint.hf.tensors import Box, shape_of
from torchtitan.models.hf_names import HFNames, HFSlice, hf_slices, is_stack


def full_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
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


def their_box(hf_slice: HFSlice, ours: Box) -> Box:
    """The smallest box of their tensor that contains a nonempty box of ours."""
    box = list(hf_slice.to_theirs(ours, slice(0, 1)))
    if hf_slice.take:
        interval = box[hf_slice.dim]
        step = hf_slice.of if hf_slice.width == 1 else None
        box[hf_slice.dim] = slice(
            hf_slice.entry(interval.start), hf_slice.entry(interval.stop - 1) + 1, step
        )
    return tuple(box)


def our_box(hf_slice: HFSlice, theirs: Box) -> Box:
    """The box of our tensor that a box of theirs contains."""
    box = list(theirs)
    if hf_slice.take:
        interval = box[hf_slice.dim]
        box[hf_slice.dim] = slice(hf_slice.before(interval.start), hf_slice.before(interval.stop))
    return hf_slice.to_ours(box)


def to_ours(hf_slice: HFSlice, value: Tensor, box: Box) -> Tensor:
    """A box of our tensor, from the values of its `their_box`; a view where possible."""
    if hf_slice.take:
        interval = hf_slice.to_theirs(box, slice(0, 1))[hf_slice.dim]
        entries = _entries(hf_slice, interval) - hf_slice.entry(interval.start)
        if len(entries) < value.shape[hf_slice.dim]:
            value = value.index_select(hf_slice.dim, entries)
    if hf_slice.dropped is not None:
        value = value.squeeze(hf_slice.dropped)
    return value.transpose(-2, -1) if hf_slice.transposed else value


def into_theirs(hf_slice: HFSlice, value: Tensor, target: Tensor, box: Box) -> None:
    """Write `value`, the `our_box` of `box`, into `target`, the values of `box` of their tensor."""
    value = value.transpose(-2, -1) if hf_slice.transposed else value
    if hf_slice.dropped is not None:
        value = value.unsqueeze(hf_slice.dropped)
    if not hf_slice.take:
        target.copy_(value)
        return
    start = box[hf_slice.dim].start
    first = hf_slice.before(start)
    entries = _entries(hf_slice, slice(first, first + value.shape[hf_slice.dim])) - start
    if hf_slice.width == 1:
        target[_along(hf_slice, slice(int(entries[0]), None, hf_slice.of))].copy_(value)
    else:
        target.index_copy_(hf_slice.dim, entries, value.to(target.dtype))


def _along(hf_slice: HFSlice, interval: slice) -> Box:
    return (*(slice(None) for _ in range(hf_slice.dim)), interval)


def _entries(hf_slice: HFSlice, interval: slice) -> Tensor:
    """`hf_slice.entry` of each index in `interval`, as a tensor."""
    index = torch.arange(interval.start, interval.stop)
    return index // hf_slice.width * hf_slice.of + hf_slice.entry(0) + index % hf_slice.width


# ---- contributions to Hugging Face's tensors


@dataclass(frozen=True)
class Contribution:
    """The contribution of one of our tensors to one of Hugging Face's."""

    ours: str
    hf_slice: HFSlice
    index: int | None
    """Index in our stack; None if our tensor isn't a stack."""

    def box(self, theirs: Box) -> Box:
        """The box of our tensor that contributes to a box of theirs."""
        our_slice = our_box(self.hf_slice, theirs)
        return our_slice if self.index is None else (slice(self.index, self.index + 1), *our_slice)

    def write(self, value: Tensor, target: Tensor, theirs: Box) -> None:
        """Write `value`, our values of `box(theirs)`, into `target`, the values of `theirs`."""
        into_theirs(
            self.hf_slice, value if self.index is None else value.squeeze(0), target, theirs
        )


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
    """Hugging Face's tensors by name, in the order of ours.

    Args:
        shapes: the shapes of our tensors, by our names.
        dtypes: the dtypes to write them in; buffers are always written in fp32.
    """
    tensors: dict[str, HFTensor] = {}
    for ours, theirs in names.items():
        stacked = is_stack(theirs)
        for i, hf_slice in enumerate(hf_slices(theirs)):
            slice_shape = shapes[ours][1:] if stacked else shapes[ours]
            shape = hf_slice.their_shape(slice_shape)
            dtype = torch.float32 if hf_slice.buffer else dtypes[ours]
            source = Contribution(ours, hf_slice, i if stacked else None)
            for name in (hf_slice.name, *hf_slice.copies):
                tensor = tensors.setdefault(name, HFTensor(shape, dtype))
                assert (tensor.shape, tensor.dtype) == (shape, dtype), f"{name} has two shapes"
                tensor.sources.append(source)
    for name, tensor in tensors.items():
        _check_coverage(name, tensor)
    return tensors


def _check_coverage(name: str, tensor: HFTensor) -> None:
    """Check that each element has exactly one source."""
    first = tensor.sources[0].hf_slice
    entries: list[int] = []
    for source in tensor.sources:
        hf_slice = source.hf_slice
        assert (hf_slice.dim, hf_slice.of) == (first.dim, first.of), f"{name} is cut in two ways"
        entries += range(*(hf_slice.take or (0, hf_slice.of)))
    assert sorted(entries) == list(range(first.of)), f"{name}: its parts don't cover it once"
