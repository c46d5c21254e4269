"""Replay of PyTorch's CUDA caching allocator: from allocations in order to what it reserves of the device.

As it is with `expandable_segments:True`: blocks are rounded up to 512 bytes; each stream has two pools, one for blocks
of up to 1 MiB and one for all others; a pool takes the smallest free block that fits, and else grows at its end, in
pages of 2 or 20 MiB. A block that one stream has freed is of no use to another, and neither are two separate free
blocks to one that needs their sum: so what is reserved is more than what is ever alive.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

ROUND, SMALL = 512, 2**20
SMALL_PAGE, LARGE_PAGE = 2 * 2**20, 20 * 2**20

Event = tuple[int, int, str]
"""(block, bytes, stream): an allocation; with 0 bytes, the end of the block."""


@dataclass
class _Pool:
    page: int
    size: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Free blocks, (bytes, offset), in order."""
    starts: dict[int, int] = field(default_factory=dict)
    """Free blocks, bytes by offset."""
    ends: dict[int, int] = field(default_factory=dict)
    """Free blocks, offset by the end."""

    def take(self, size: int) -> int:
        """The offset of a new block."""
        place = bisect.bisect_left(self.sizes, (size, -1))
        if place < len(self.sizes):
            found, offset = self.sizes[place]
            self._remove(found, offset)
        else:
            offset = self.ends.get(self.size, self.size)  # a free block at the end is part of the new one
            found = self.size - offset
            if found:
                self._remove(found, offset)
            pages = -(-(size - found) // self.page)
            self.size += pages * self.page
            found += pages * self.page
        if found > size:
            self._insert(found - size, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a block, and join it with its free neighbours."""
        if after := self.starts.get(offset + size):
            self._remove(after, offset + size)
            size += after
        if (start := self.ends.get(offset)) is not None:
            before = self.starts[start]
            self._remove(before, start)
            offset, size = start, size + before
        self._insert(size, offset)

    def _insert(self, size: int, offset: int) -> None:
        bisect.insort(self.sizes, (size, offset))
        self.starts[offset] = size
        self.ends[offset + size] = offset

    def _remove(self, size: int, offset: int) -> None:
        del self.sizes[bisect.bisect_left(self.sizes, (size, offset))]
        del self.starts[offset], self.ends[offset + size]


def reserved(events: Iterable[Event]) -> int:
    """Bytes that the allocator holds at the end, which are its most: it gives nothing back."""
    pools: dict[tuple[str, bool], _Pool] = {}
    placed: dict[int, tuple[_Pool, int, int]] = {}
    for block, size, stream in events:
        if size:
            size = -(-size // ROUND) * ROUND
            small = size <= SMALL
            pool = pools.setdefault((stream, small), _Pool(SMALL_PAGE if small else LARGE_PAGE))
            placed[block] = pool, pool.take(size), size
        elif block in placed:
            pool, offset, size = placed.pop(block)
            pool.give(offset, size)
    return sum(pool.size for pool in pools.values())
