"""Whether boxes fill a tensor, each element once.

Counting elements isn't enough: two equal halves have as many as the whole. Comparing pairs of boxes
would take minutes with those of thousands of ranks. Instead, each coordinate of each dimension gets
a random number, and a box is worth the product of the differences over its sides. That is additive:
boxes are worth together what the whole is worth if they fill it. If they don't, the worths are
polynomials that differ, and are equal for random numbers with a probability below 10^-15.
"""

import secrets
from collections import defaultdict
from collections.abc import Iterable

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

_PRIME = 2**61 - 1


def fill(boxes: Iterable[ChunkStorageMetadata], whole: ChunkStorageMetadata) -> bool:
    """Whether the parts of `boxes` in `whole` fill it without overlap."""
    numbers: defaultdict[tuple[int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))

    def worth(box: ChunkStorageMetadata) -> int:
        product = 1
        sides = zip(box.offsets, box.sizes, whole.offsets, whole.sizes, strict=True)
        for dim, (start, length, low, size) in enumerate(sides):
            first = max(start, low)
            stop = min(start + length, low + size)
            if first >= stop:
                return 0
            product = product * (numbers[dim, stop] - numbers[dim, first]) % _PRIME
        return product

    return sum(map(worth, boxes)) % _PRIME == worth(whole)
