"""Pieces of weights between Hugging Face's arrangement and ours, as a `Part` declares it."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchtitan.checkpoint.hf.stored import Box
from torchtitan.models.hf_names import Part


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


def their_box(part: Part, ours: Box) -> Box:
    """The smallest box of theirs that holds a box of ours, which isn't empty."""
    box = list(part.to_theirs(ours, slice(0, 1)))
    if part.take:
        taken = box[part.dim]
        step = part.of if part.width == 1 else None
        box[part.dim] = slice(part.entry(taken.start), part.entry(taken.stop - 1) + 1, step)
    return tuple(box)


def our_box(part: Part, theirs: Box) -> Box:
    """The box of ours that a box of theirs holds."""
    box = list(theirs)
    if part.take:
        taken = box[part.dim]
        box[part.dim] = slice(part.before(taken.start), part.before(taken.stop))
    return part.to_ours(box)


def to_ours(part: Part, value: Tensor, box: Box) -> Tensor:
    """A box of ours, from `their_box` of it; a view where that can be one."""
    if part.take:
        taken = part.to_theirs(box, slice(0, 1))[part.dim]
        entries = _entries(part, taken) - part.entry(taken.start)
        if len(entries) < value.shape[part.dim]:
            value = value.index_select(part.dim, entries)
    if part.dropped is not None:
        value = value.squeeze(part.dropped)
    return value.transpose(-2, -1) if part.transposed else value


def into_theirs(part: Part, value: Tensor, target: Tensor, box: Box) -> None:
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


def _along(part: Part, taken: slice) -> Box:
    return (*(slice(None) for _ in range(part.dim)), taken)


def _entries(part: Part, taken: slice) -> Tensor:
    """`part.entry` of each of `taken`."""
    index = torch.arange(taken.start, taken.stop)
    return index // part.width * part.of + part.entry(0) + index % part.width
