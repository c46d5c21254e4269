"""Boxes of a checkpoint's tensors, read in order."""

from collections.abc import Collection

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchtitan.checkpoint.load import Reader


class BoxReader:
    """Reads tensors box by box, each element once.

    A part of a tensor, as it was written, is read whole, because its checksum is of all of it. It
    stays in memory until all its elements were asked for: so boxes in the order of the parts take
    one part, and other boxes at most the tensor.
    """

    def __init__(self, reader: Reader):
        self.reader = reader
        self._parts: dict[MetadataIndex, Tensor] = {}
        self._left: dict[MetadataIndex, int] = {}
        """Elements of each part that were not asked for."""

    def forget(self, besides: Collection[str] = ()) -> None:
        """Free the parts of all tensors but those of the keys `besides`."""
        for index in [index for index in self._parts if index.fqn not in besides]:
            del self._parts[index], self._left[index]

    def read(self, key: str, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor, in its stored dtype; a view of a part where it is in a single one.

        Raises:
            DamageError: it can't be read.
        """
        offsets = torch.Size(part.start for part in box)
        sizes = torch.Size(part.stop - part.start for part in box)
        chunk = ChunkStorageMetadata(offsets, sizes)
        self.reader.index.locate(key, chunk)
        about = self.reader.read_metadata().state_dict_metadata[key]
        items = create_read_items_for_chunk_list(key, about, [chunk])
        out = None
        for item in items:
            index = item.storage_index
            if index not in self._parts:
                self._parts[index] = self.reader.read_part(index)
                self._left[index] = self._parts[index].numel()
            value = _narrowed(self._parts[index], item.storage_offsets, item.lengths)
            self._left[index] -= value.numel()
            if not self._left[index]:
                del self._parts[index], self._left[index]
            if len(items) == 1:
                return value
            out = torch.empty(sizes, dtype=value.dtype) if out is None else out
            _narrowed(out, item.dest_offsets, item.lengths).copy_(value)
        assert out is not None or not sizes.numel(), f"{key} has no {box}"
        return torch.empty(sizes, dtype=about.properties.dtype) if out is None else out


def _narrowed(tensor: Tensor, offsets: torch.Size, sizes: torch.Size) -> Tensor:
    ends = zip(offsets, sizes, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in ends)]
