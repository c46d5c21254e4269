"""The assignment of a tensor's boxes to the ranks that write them. Every rank derives it without a
message.

A tensor is cut along its dimensions by the axes of a mesh, whose ranks are a regular grid. So the
first rank and two numbers for each cut locate any box, on any number of ranks.
"""

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import product
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan.utils.formats import Count

_SPREAD = 2**16
"""Size in bytes from which the ranks with copies of tensors take turns in writing them. One rank
writes all smaller tensors, so a reader opens few files for them.
"""
_PRIME = 2**61 - 1


class Cut(NamedTuple):
    """A dimension cut into equal pieces, except for the last ones, as `torch.chunk` does."""

    pieces: Annotated[int, Field(ge=1, lt=2**31)]
    stride: Count
    """Difference of the ranks of neighboring pieces."""


class Layout(NamedTuple):
    """The ranks that write the boxes of one tensor."""

    first: Count
    """The rank that writes the first box."""
    cuts: Annotated[list[Annotated[list[Cut], Field(max_length=8)]], Field(max_length=64)]
    """The cuts of each dimension, coarsest first: each cuts the pieces of the previous one."""

    def box(self, size: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of the box that `rank`, one of this layout's ranks, writes."""
        all_cuts = {cut for cuts in self.cuts for cut in cuts}
        coordinates = {}
        remainder = rank - self.first
        for cut in sorted(all_cuts, key=lambda cut: -cut.stride):
            coordinates[cut] = remainder // cut.stride if cut.pieces > 1 else 0
            remainder -= coordinates[cut] * cut.stride
        offsets = []
        sizes = []
        for length, cuts in zip(size, self.cuts, strict=True):
            start = 0
            for cut in cuts:
                step = -(-length // cut.pieces)
                low = min(coordinates[cut] * step, length)
                length = min(step, length - low)
                start += low
            offsets.append(start)
            sizes.append(length)
        return tuple(offsets), tuple(sizes)

    def ranks(self, size: tuple[int, ...], box: ChunkStorageMetadata) -> Iterator[int]:
        """The ranks that wrote any element of a box of a tensor of this size."""
        dimensions = zip(self.cuts, box.offsets, box.sizes, size, strict=True)
        distances_by_dim = [
            list(_distances(cuts, start, start + count, length))
            for cuts, start, count, length in dimensions
        ]
        for distances in product(*distances_by_dim):
            yield self.first + sum(distances)


def _distances(cuts: list[Cut], start: int, stop: int, length: int) -> Iterator[int]:
    """The ranks that hold any index from `start` to `stop`, relative to the first rank."""
    if start >= stop:
        return
    if not cuts:
        yield 0
        return
    (count, stride), *finer = cuts
    step = -(-length // count)
    for i in range(start // step, -(-stop // step)):
        low = i * step
        piece = min(step, length - low)
        for distance in _distances(finer, max(start - low, 0), min(stop - low, piece), piece):
            yield i * stride + distance


class Share(NamedTuple):
    """A rank's share in writing one tensor."""

    layout: Layout
    writes: bool
    """Whether this rank writes its box; otherwise another rank with the same box does."""


def shares(
    tensors: Mapping[str, Tensor], rank: int, holders: range
) -> tuple[dict[str, Share], int]:
    """A rank's share in writing its tensors. Of the ranks with copies of a box, the one with the
    fewest bytes so far writes it.

    Args:
        holders: the ranks with these tensors, or shards of them, which are at the same position of
            the pipeline.

    Returns:
        The share by name, and a number that must be the same on all `holders`; otherwise tensors
        would be missing from the checkpoint.
    """
    loads: dict[int, int] = {}
    grids: dict[DeviceMesh, tuple[int, list[Cut]]] = {}
    share_by_name = {}
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        cuts, copies, local_first = _layout(tensor, rank, holders, grids)
        first = Layout(0, cuts).box(tuple(tensor.shape), 0)[1]
        bytes_each = math.prod(first) * tensor.dtype.itemsize
        writer = copies[0]
        if bytes_each >= _SPREAD:
            writer = min(copies, key=lambda copy: loads.get(copy, 0))
        loads[writer] = loads.get(writer, 0) + bytes_each
        layout = Layout(writer, cuts)
        share_by_name[name] = Share(layout, local_first == writer)
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), layout)).encode())
    return share_by_name, int.from_bytes(digest.digest()[:7])


def _layout(
    tensor: Tensor, rank: int, holders: range, grids: dict[DeviceMesh, tuple[int, list[Cut]]]
) -> tuple[list[list[Cut]], list[int], int]:
    """The cuts of a tensor, the first rank of each copy, and the first rank of this rank's copy."""
    cuts: list[list[Cut]] = [[] for _ in tensor.shape]
    if not isinstance(tensor, DTensor):
        return cuts, list(holders), rank
    mesh = tensor.device_mesh
    if mesh not in grids:
        grids[mesh] = _grid(mesh)
    first, axes = grids[mesh]
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "a tensor of a mesh that this rank is not in"
    copies = [first]
    local_first = rank
    for axis in reversed(range(len(axes))):
        placement: Any = tensor.placements[axis]
        cut = axes[axis]
        if placement.is_replicate():
            copies = [copy + i * cut.stride for i in range(cut.pieces) for copy in copies]
            continue
        # A strided shard cuts the pieces of as many of the inner axes as its factor says.
        along = cuts[placement.dim]
        before = 0
        pieces = 1
        while pieces < getattr(placement, "split_factor", 1) and before < len(along):
            pieces *= along[before].pieces
            before += 1
        along.insert(before, cut)
        local_first -= coordinates[axis] * cut.stride
    return cuts, sorted(copies), local_first


def _grid(mesh: DeviceMesh) -> tuple[int, list[Cut]]:
    """First rank of a mesh, and size and stride of its axes."""
    ranks = mesh.mesh.tolist()
    first: Any = ranks
    axes = []
    for count in mesh.mesh.shape:
        second = first[1] if count > 1 else None
        first = first[0]
        axes.append((count, second))
    flat = mesh.mesh.flatten().tolist()
    cuts = []
    for count, second in axes:
        while isinstance(second, list):
            second = second[0]
        cuts.append(Cut(count, second - first if second is not None else 0))
    positions = product(*(range(cut.pieces) for cut in cuts))
    expected = [
        first + sum(i * cut.stride for i, cut in zip(position, cuts, strict=True))
        for position in positions
    ]
    assert flat == expected, f"the ranks of a mesh are no regular grid: {flat[:8]}"
    return first, cuts


def fill(boxes: Iterable[ChunkStorageMetadata], region: ChunkStorageMetadata) -> bool:
    """Whether the intersections of `boxes` with a region fill it without overlap.

    Counting elements isn't enough: two equal halves have as many as the whole. Comparing pairs of
    boxes would take minutes for thousands of ranks. Instead, each coordinate of each dimension gets
    a random number, and a box is worth the product of the differences over its sides. Worth is
    additive: boxes that fill the region are together worth as much as the region. Otherwise the two
    worths are different polynomials, which random numbers make equal with a probability below
    10^-15.
    """
    numbers: defaultdict[tuple[int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))

    def worth(box: ChunkStorageMetadata) -> int:
        volume = 1
        sides = zip(box.offsets, box.sizes, region.offsets, region.sizes, strict=True)
        for dim, (start, length, low, size) in enumerate(sides):
            first = max(start, low)
            stop = min(start + length, low + size)
            if first >= stop:
                return 0
            volume = volume * (numbers[dim, stop] - numbers[dim, first]) % _PRIME
        return volume

    return sum(map(worth, boxes)) % _PRIME == worth(region)
