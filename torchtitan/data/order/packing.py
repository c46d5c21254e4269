"""Best-fit packing: rows that begin with a document, and cut only documents longer than a row.

    documents     a of 10 tokens, b of 3, c of 5, d of 2
    rows of 8     a a a a a a a a | a a a c c c c c | b b b d d . . .

Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830, 2024). Documents come
in pools. Documents longer than a row are cut into pieces that overlap by one id. Then the last
piece of each, and all shorter documents, longest first, go to the fullest row that has room. The
space that remains in a row is padding.

The first id of a piece isn't predicted, because nothing of its document is before it in the row;
the piece before predicts the first id of a later piece. So every id of a document except its first
is predicted exactly once, and never from another document.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.tokenizer import UNPREDICTED
from torchtitan.utils.wording import plural

FIRST_POOL_ROWS = 4
"""Approximate rows of a lane's first pool: few, so that the first step starts soon. Each later pool
is twice as large, up to `POOL_ROWS`.
"""
POOL_ROWS = 64
_FILE_POOL_ROWS = 1024
"""Approximate rows of a pool of a token file."""


@dataclass
class PackingStats:
    """The cost of packing, compared with a stream of the same documents."""

    rows: int = 0
    ids: int = 0
    """Ids of all rows, padding included."""
    padding: int = 0
    documents: int = 0
    cut: int = 0
    """Documents longer than a row."""
    cut_by_stream: int = 0
    """Documents that would lie in several rows if they followed one another."""

    def __add__(self, other: "PackingStats") -> "PackingStats":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return PackingStats(**sums)

    def __str__(self) -> str:
        of = max(self.documents, 1)
        return (
            f"{plural(self.documents, 'document')} in {plural(self.rows, 'packed row')}: "
            f"{self.padding / max(self.ids, 1):.2%} is padding, {self.cut / of:.1%} of the "
            f"documents are cut; a stream would cut {self.cut_by_stream / of:.1%}"
        )


def pack(
    documents: Sequence[NDArray[Any]], length: int, pad: int
) -> tuple[NDArray[np.uint32], PackingStats]:
    """Pack a pool.

    Args:
        documents: the ids of each; they may be flagged.
        length: ids of a row; at least 2.
        pad: id of the padding.

    Returns:
        Rows `[rows, length]`, in the order of their first documents.
    """
    pieces = [piece for document in documents for piece in _cut(document, length)]
    bins = best_fit([len(piece) for piece in pieces], length)
    rows = np.full((len(bins), length), pad | UNPREDICTED, np.uint32)
    padding = 0
    for row, items in zip(rows, bins, strict=True):
        at = 0
        for i in items:
            row[at : at + len(pieces[i])] = pieces[i]
            row[at] |= UNPREDICTED
            at += len(pieces[i])
        padding += length - at
    sizes = np.array([len(document) for document in documents])
    ends = sizes.cumsum()
    across = (ends - sizes) // length != (ends - 1) // length
    return rows, PackingStats(
        len(rows),
        rows.size,
        padding,
        len(documents),
        cut=int((sizes > length).sum()),
        cut_by_stream=int(across.sum()),
    )


class Packer:
    """Packs the documents of a token file."""

    def __init__(self, length: int, pad: int):
        self.length = length
        self.pad = pad
        self.stats = PackingStats()
        self._pool: list[NDArray[Any]] = []
        self._ids = 0

    def add(self, documents: Sequence[NDArray[Any]]) -> Iterator[NDArray[np.uint32]]:
        """Add documents; yields the packed ids of each complete pool."""
        for document in documents:
            self._pool.append(document)
            self._ids += len(document)
            if self._ids >= _FILE_POOL_ROWS * self.length:
                yield self.finish()

    def finish(self) -> NDArray[np.uint32]:
        """The packed ids of the current pool, which ends it."""
        rows, stats = pack(self._pool, self.length, self.pad)
        self.stats += stats
        self._pool = []
        self._ids = 0
        return rows.ravel()

    @property
    def description(self) -> dict[str, Any]:
        """Entries of a token file's description."""
        return {"packed": self.length, "packing": vars(self.stats)}


def _cut(document: NDArray[Any], length: int) -> list[NDArray[Any]]:
    if len(document) <= length:
        return [document]
    starts = range(0, len(document) - 1, length - 1)
    return [document[start : start + length] for start in starts]


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Divide items among bins by best-fit decreasing, which needs at most 11/9 of the fewest bins
    possible, and one (Johnson, "Near-optimal bin packing algorithms", 1973).

    Args:
        sizes: of the items; none larger than a bin.

    Returns:
        The items of each bin, ascending; bins in the order of their first items.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """Remaining room and index of each bin that isn't full, ascending."""
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(rooms, (sizes[item], 0))
        if at < len(rooms):
            room, index = rooms.pop(at)
            bins[index].append(item)
        else:
            room, index = capacity, len(bins)
            bins.append([item])
        if room > sizes[item]:
            insort(rooms, (room - sizes[item], index))
    return sorted(sorted(items) for items in bins)
