"""Hugging Face's tensors, as they are written from ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtitan.checkpoint.hf.pieces import into_theirs, our_box
from torchtitan.checkpoint.hf.stored import Box
from torchtitan.models.hf_names import HFNames, Part, is_stack, parts_of


@dataclass(frozen=True)
class Source:
    """What one of ours is of one of theirs."""

    ours: str
    part: Part
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
class Theirs:
    """One of Hugging Face's tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[Source] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def arrange(
    names: HFNames, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Theirs]:
    """Hugging Face's tensors by name, in the order in which ours are.

    Args:
        shapes: of ours, by our names.
        dtypes: of ours, as they are to be written; a buffer is written in fp32.
    """
    found: dict[str, Theirs] = {}
    for ours, theirs in names.items():
        stacked = is_stack(theirs)
        for i, part in enumerate(parts_of(theirs)):
            own = shapes[ours][1:] if stacked else shapes[ours]
            shape = part.their_shape(own)
            dtype = torch.float32 if part.buffer else dtypes[ours]
            source = Source(ours, part, i if stacked else None)
            for name in (part.name, *part.copies):
                tensor = found.setdefault(name, Theirs(shape, dtype))
                assert (tensor.shape, tensor.dtype) == (shape, dtype), f"{name} has two shapes"
                tensor.sources.append(source)
    for name, tensor in found.items():
        _check_covered(name, tensor)
    return found


def _check_covered(name: str, tensor: Theirs) -> None:
    """Each element must have one source."""
    first = tensor.sources[0].part
    taken: list[int] = []
    for source in tensor.sources:
        part = source.part
        assert (part.dim, part.of) == (first.dim, first.of), f"{name} is cut in two ways"
        taken += range(*(part.take or (0, part.of)))
    assert sorted(taken) == list(range(first.of)), f"{name}: its parts don't cover it once"
