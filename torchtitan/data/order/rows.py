"""The one global order of rows, whichever rank reads them.

A step consumes G rows (the global batch). A row is `seq_len + 1` token ids; consecutive rows of a
source overlap by one id, so every id is predicted once, also where `seq_len` changes. Missing ids
at the end of finite data are `IGNORE_INDEX`. `mixture` says which rows of a step come from which
source; a source's reader delivers those that its rank reads. The contents of a row depend neither
on the other rows that a rank reads nor on the layout.

    token files   are cut into windows, which are shuffled; `windows` says which of them a row has
    text          the source has L lanes; a lane reads its own documents, one after another, and
                  cuts rows from [bos] text [eos] [bos] text [eos] ...; the position is one small
                  record per lane; or packs rows that begin with documents (`packing`)

The place of a row in its step decides its lane, so a rank needs only the lanes of its own places.
Where ranks share a lane, each reads past the other's rows. Random-access text has as many lanes as
the batch has rows, a stream as many as its shards allow (`lanes`).
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.order.packing import PackingStats
from torchtitan.data.read.positions import SourcePosition

IGNORE_INDEX = -100
"""Label of positions that are not predicted."""

Row = NDArray[np.int64]
"""`[seq_len + 1]` token ids, some of which may be flagged (`tokenizer.UNPREDICTED`)."""
Share = tuple[tuple[int, int], ...]
"""The rows of a step that a reader delivers. A pair `(index, count)` chooses one of `count` equal
ranges of rows; the next pair divides that range further.
"""


class SourceReader(ABC):
    """Reads a share of the rows of one source."""

    @abstractmethod
    def read(self, step: int, count: int, places: NDArray[np.int64], length: int) -> dict[int, Row]:
        """This reader's rows of a step by their places; after the source's end, rows are missing.

        Args:
            step: counted from 0.
            count: rows of the step, over all sources and ranks.
            places: the places of this source's rows in the step, ascending.
            length: `seq_len` of the step.
        """

    def left(self, length: int) -> int | None:
        """Rows of a length until the source ends; None if it doesn't."""
        return None

    @property
    def packed(self) -> PackingStats:
        """The cost of packing since this reader began."""
        return PackingStats()

    @property
    @abstractmethod
    def epochs(self) -> float:
        """How often the source has been read; for text, the mean over this reader's lanes."""

    @abstractmethod
    def position(self) -> SourcePosition:
        """The position after the last step, with this reader's lanes."""

    @abstractmethod
    def seek(self, position: SourcePosition) -> None:
        """Continue from a position with all lanes."""


def local_rows(count: int, share: Share) -> range:
    """The rows of a step of `count` that a share delivers."""
    rows = range(count)
    for index, of in share:
        first = rows.start + len(rows) * index // of
        after = rows.start + len(rows) * (index + 1) // of
        rows = range(first, after)
    return rows


def blank_row(seq_len: int) -> Row:
    """A row without labels."""
    return np.full(seq_len + 1, IGNORE_INDEX)


def padded(ids: Row, seq_len: int) -> Row:
    """A row, without labels where ids are missing."""
    row = blank_row(seq_len)
    row[: len(ids)] = ids
    return row
