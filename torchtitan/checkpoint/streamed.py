"""Writing a checkpoint in one process, with a piece of a tensor in memory at a time."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from torchtitan.checkpoint.commit import discard
from torchtitan.checkpoint.save import save
from torchtitan.checkpoint.writer import CommittingWriter


class LazyPlanner(DefaultSavePlanner):
    """Plans a save of meta tensors, and makes each piece of them only when it is written."""

    def __init__(self, make: Callable[[str, tuple[slice, ...]], Tensor], most: float):
        super().__init__()
        self.make = make
        self.most = most

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [piece for item in plan.items for piece in _rows(item, self.most)]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        box = tuple(slice(start, start + size) for start, size in ends)
        return self.make(write_item.index.fqn, box)


def _rows(item: WriteItem, most: float) -> Iterator[WriteItem]:
    """An item, cut along its first dimension into such of at most `most` bytes, or one row."""
    about = item.tensor_data
    assert about is not None
    size = about.size.numel() * about.properties.dtype.itemsize
    if size <= most:
        yield item
        return
    rows = max(1, int(most * about.size[0] / size))
    for start in range(0, about.size[0], rows):
        offsets = torch.Size((start, *(0 for _ in about.size[1:])))
        sizes = torch.Size((min(rows, about.size[0] - start), *about.size[1:]))
        chunk = ChunkStorageMetadata(offsets, sizes)
        index = replace(item.index, offset=offsets)
        data = replace(about, chunk=chunk)
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def write_streamed(
    final: Path,
    manifest: dict[str, Any],
    state: dict[str, Any],
    make: Callable[[str, tuple[slice, ...]], Tensor],
    most: float = 2**25,
) -> None:
    """Write a checkpoint in one process, a piece of a tensor in memory at a time; a failure leaves
    nothing.

    Args:
        final: its folder.
        manifest: what its manifest says beside its files.
        state: the tensors, on the meta device.
        make: returns a box of a tensor, by its key and a slice of each dimension.
        most: bytes of the tensors that are made whole. Larger ones are made in rows of the first
            dimension.
    """
    # DCP holds all tensors of a file until it is complete, hence one file per tensor.
    writer = CommittingWriter(final, manifest, file_per_tensor=True)
    try:
        save(state, writer, LazyPlanner(make, most), alone=True)
    except BaseException:
        with suppress(Exception):
            discard(final)
        raise
