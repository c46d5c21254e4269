"""PyTorch's CUDA caching allocator, replayed: from allocations to the memory it reserves.

It replays `expandable_segments:True`. Blocks are rounded up to 512 bytes. Each stream has two
pools, one for blocks up to 1 MiB and one for larger blocks. A pool uses the smallest free block
that fits, or grows at its end in pages of 2 or 20 MiB. A stream can't use a block that another has
freed, nor can a large block use two separate free ones, so more is reserved than is ever allocated.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.traced_step.tracer import Block
from torchtitan.tools.planner.memory import CATEGORIES

ROUND = 512
SMALL = 2**20
SMALL_PAGE = 2 * 2**20
LARGE_PAGE = 20 * 2**20
"""Bytes: kMinBlockSize, kSmallSize, kSmallBuffer and kLargeBuffer of PyTorch's
c10/cuda/CUDACachingAllocator.
"""

Event = tuple[int, int, str]
"""(block, bytes, stream): an allocation, or with 0 bytes a free."""


@dataclass
class _Pool:
    page: int
    size: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, offset) of the free blocks, sorted."""
    starts: dict[int, int] = field(default_factory=dict)
    """Bytes of each free block by its offset."""
    ends: dict[int, int] = field(default_factory=dict)
    """Offset of each free block by its end."""

    def take(self, size: int) -> int:
        """Allocate a block and return its offset."""
        place = bisect.bisect_left(self.sizes, (size, -1))
        if place < len(self.sizes):
            found, offset = self.sizes[place]
            self._remove(found, offset)
        else:
            # The new block starts in a free one at the end.
            offset = self.ends.get(self.size, self.size)
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
        """Free a block and merge it with its free neighbours."""
        if after := self.starts.get(offset + size):
            self._remove(after, offset + size)
            size += after
        if (start := self.ends.get(offset)) is not None:
            before = self.starts[start]
            self._remove(before, start)
            offset = start
            size = size + before
        self._insert(size, offset)

    def _insert(self, size: int, offset: int) -> None:
        bisect.insort(self.sizes, (size, offset))
        self.starts[offset] = size
        self.ends[offset + size] = offset

    def _remove(self, size: int, offset: int) -> None:
        del self.sizes[bisect.bisect_left(self.sizes, (size, offset))]
        del self.starts[offset], self.ends[offset + size]


def reserved(events: Iterable[Event]) -> int:
    """Bytes reserved at the end, which is the peak: nothing is returned to the device."""
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


# ---- traces


def peak_by_part(
    blocks: list[Block], lasting: Iterable[int], events: Iterable[tuple[int, bool]]
) -> dict[str, int]:
    """Bytes by part at the peak of `events`, with `lasting` blocks allocated throughout."""
    now = dict.fromkeys(CATEGORIES, 0)
    for number in lasting:
        now[blocks[number].part] += blocks[number].size
    total = most = sum(now.values())
    peak = dict(now)
    alive: set[int] = set()
    for number, new in events:
        block = blocks[number]
        if new:
            alive.add(number)
            change = block.size
        elif number in alive:
            alive.remove(number)
            change = -block.size
        else:
            continue
        now[block.part] += change
        total += change
        if total > most:
            most = total
            peak = dict(now)
    return peak


def replay(
    blocks: list[Block], first: list[tuple[int, bool]], steady: list[tuple[int, bool]]
) -> int:
    """Bytes reserved after two steps; the second reuses the first one's optimizer state."""
    alive = {number for number, new in first if new} - {number for number, new in first if not new}
    left = alive & {number for number, _ in steady}
    events: list[Event] = []
    for number, new in first:
        events.append((number, blocks[number].size if new else 0, blocks[number].stream))
    for number in left:
        events.append((number, 0, blocks[number].stream))
    for number, new in steady:
        again = number + len(blocks)
        events.append((again, blocks[number].size if new else 0, blocks[number].stream))
    return reserved(events)
