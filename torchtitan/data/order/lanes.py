"""Lanes: endless sequences of documents that rows are made of.

A `StreamLane` lays them end to end and cuts rows from the result, a `PackedLane` packs them. The
position of either is one small record.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.tokenizer import UNPREDICTED
from torchtitan.data.order.packing import FIRST_POOL_ROWS, POOL_ROWS, PackingStats, pack
from torchtitan.data.order.rows import Row, Share, SourceReader, local_rows, pad_row, permute
from torchtitan.data.read.documents import Documents
from torchtitan.data.read.opening import Retry
from torchtitan.data.read.positions import (
    DocumentPosition,
    LanePosition,
    PackedPosition,
    SourcePosition,
    StreamPosition,
)


class Cursor(Protocol):
    """The sequence of documents of a lane."""

    @property
    def epochs(self) -> float:
        """Epochs of the lane's documents that were read."""

    def next(self) -> str | None:
        """The next document; None at the end of a finite pass."""

    def position(self) -> DocumentPosition | StreamPosition: ...

    def seek(self, position: Any) -> None:
        """Continue from a `position` of such a cursor."""


class DocumentCursor:
    """The documents of a lane: every L-th of all epochs, one epoch after another."""

    def __init__(self, documents: Documents, lane: int, lanes: int, seed: int | None, retry: Retry):
        """
        Args:
            seed: shuffles each epoch differently; None makes one pass in order.
        """
        self.documents = documents
        self.lane = lane
        self.lanes = lanes
        self.seed = seed
        self.retry = retry
        self.upcoming = lane
        """The next document, counted over all epochs."""

    def next(self) -> str | None:
        size = len(self.documents)
        epoch, index = divmod(self.upcoming, size)
        if self.seed is not None:
            index = permute(index, size, self.seed, epoch)
        elif epoch:
            return None
        self.upcoming += self.lanes
        return self.retry(f"document {index}", lambda: self.documents[index])

    @property
    def epochs(self) -> float:
        return (self.upcoming - self.lane) / len(self.documents)

    def position(self) -> DocumentPosition:
        return DocumentPosition(position=self.upcoming)

    def seek(self, position: DocumentPosition) -> None:
        self.upcoming = position.position


class DocumentEncoder(Protocol):
    """Turns documents into ids: a tokenizer, or one with its chat template."""

    def encode_in_pieces(self, text: str, start: int = 0) -> Iterator[tuple[int, Row]]:
        """See `Tokenizer.encode_in_pieces`."""


class Lane(ABC):
    """Makes rows from a cursor's documents."""

    cursor: Cursor

    @abstractmethod
    def row(self, length: int) -> Row | None:
        """The next row of `length + 1` ids; None after the end of a finite pass."""

    @abstractmethod
    def position(self) -> LanePosition | PackedPosition: ...

    @abstractmethod
    def seek(self, position: Any) -> None:
        """Continue from a `position` of such a lane."""


class StreamLane(Lane):
    """Cuts rows from the documents laid end to end.

    Its position is the cursor's position before the current document, and an offset in that
    document, which a resume tokenizes again. A long document is tokenized in pieces: its offset
    counts from the current piece, whose start is part of the position.
    """

    def __init__(self, cursor: Cursor, encoder: DocumentEncoder):
        self.cursor = cursor
        self.encoder = encoder
        self.before = cursor.position()
        """The cursor's position before the current document."""
        self.ids: Row | None = None
        """The current document, or the current piece of it; None between two documents."""
        self.start = 0
        """Where the current piece starts in its document."""
        self.offset = 0
        self.pieces: Iterator[tuple[int, Row]] = iter(())

    def row(self, length: int) -> Row | None:
        """The next row of `length + 1` ids, padded where the data ends; None after the end."""
        chunks: list[Row] = []
        deficit = length + 1
        while deficit:
            if self.ids is None and not self._read():
                break
            assert self.ids is not None
            chunk = self.ids[self.offset : self.offset + deficit]
            chunks.append(chunk)
            deficit -= len(chunk)
            self.offset += len(chunk)
            if deficit:
                self.ids = None
        if deficit >= length:  # only the last row's last id is left
            return None
        # The next row begins with this row's last id.
        self.offset -= 1
        return pad_row(np.concatenate(chunks), length)

    def _read(self, start: int = 0) -> bool:
        """Get the next piece, or else the next document from position `start` on."""
        piece = next(self.pieces, None)
        if piece is None:
            before = self.cursor.position()
            text = self.cursor.next()
            if text is None:
                return False
            self.before = before
            self.pieces = self.encoder.encode_in_pieces(text, start)
            piece = next(self.pieces)
        self.start, self.ids = piece
        self.offset = 0
        return True

    def position(self) -> LanePosition:
        if self.ids is None:
            return LanePosition(cursor=self.before, offset=-1)
        return LanePosition(cursor=self.before, offset=self.offset, position=self.start)

    def seek(self, position: LanePosition) -> None:
        self.cursor.seek(position.cursor)
        self.before = position.cursor
        self.ids = None
        self.pieces = iter(())
        if position.offset >= 0 and self._read(position.position):
            self.offset = position.offset


class PackedLane(Lane):
    """Packs pools of documents into rows of one length (`packing`).

    Its position is the cursor's position before the pool, and the index of the pool's next row. The
    next pool is read row by row along with this one, so that no row waits for a whole pool.
    """

    def __init__(self, cursor: Cursor, encoder: DocumentEncoder, length: int, pad: int):
        """
        Args:
            length: ids of a row; the last label is padding.
            pad: id of the padding.
        """
        self.cursor = cursor
        self.encoder = encoder
        self.length = length
        self.pad = pad
        self.rows = np.empty((0, length), np.uint32)
        """Rows of the current pool."""
        self.next_row = 0
        """The pool's next row."""
        self.size = min(FIRST_POOL_ROWS, POOL_ROWS)
        """Approximate number of rows that the pool fills."""
        self.next_size = self.size
        self.before = cursor.position()
        """The cursor's position before the pool."""
        self.next_documents: list[NDArray[np.uint32]] = []
        """Documents of the next pool."""
        self.ids = 0
        """Number of ids in `next_documents`."""
        self.after = self.before
        """The cursor's position before `next_documents`."""
        self.packing_stats = PackingStats()
        """Statistics of the pools of full size."""

    def row(self, length: int) -> Row | None:
        assert length == self.length, "the rules refuse other lengths"
        if self.next_row == len(self.rows) and not self._next_pool():
            return None
        row = self.rows[self.next_row].astype(np.int64)
        self.next_row += 1
        self._read(self.next_size * self.length * self.next_row // len(self.rows))
        return np.append(row, self.pad | UNPREDICTED)

    def _next_pool(self) -> bool:
        self._read(self.next_size * self.length)
        if not self.next_documents:
            return False
        self.rows, packing_stats = pack(self.next_documents, self.length, self.pad)
        self.size = self.next_size
        self.next_size = min(2 * self.size, POOL_ROWS)
        if self.size == POOL_ROWS:
            self.packing_stats += packing_stats
        self.next_row = 0
        self.before = self.after
        self.after = self.cursor.position()
        self.next_documents = []
        self.ids = 0
        return True

    def _read(self, count: int) -> None:
        """Read documents until the next pool has `count` ids."""
        while self.ids < count and (text := self.cursor.next()) is not None:
            pieces = [ids.astype(np.uint32) for _, ids in self.encoder.encode_in_pieces(text)]
            self.next_documents.append(np.concatenate(pieces))
            self.ids += len(self.next_documents[-1])

    def position(self) -> PackedPosition:
        at_end = self.next_row == len(self.rows)
        return PackedPosition(
            cursor=self.after if at_end else self.before,
            pool_rows=self.next_size if at_end else self.size,
            rows=0 if at_end else self.next_row,
            length=self.length,
        )

    def seek(self, position: PackedPosition) -> None:
        self.cursor.seek(position.cursor)
        self.before = self.after = position.cursor
        self.next_documents = []
        self.ids = 0
        self.rows = self.rows[:0]
        self.next_row = 0
        self.next_size = position.pool_rows
        if position.rows and self._next_pool():
            # A registered stream that has changed unnoticed may have fewer.
            self.next_row = min(position.rows, len(self.rows))


class LaneReader(SourceReader):
    """Rows of text, cut from lanes."""

    def __init__(self, contents: str, share: Share, lanes: dict[int, Lane], count: int):
        """
        Args:
            contents: fingerprint of the source.
            lanes: the lanes that have rows of the share.
            count: number of lanes of the source.
        """
        self.contents = contents
        self.share = share
        self.lanes = lanes
        self.count = count
        self.active = set(lanes)
        """Lanes that haven't ended."""
        self.ended = not lanes

    def read(self, step: int, count: int, slots: NDArray[np.int64], length: int) -> dict[int, Row]:
        local = local_rows(count, self.share)
        lanes = lane_of_each(slots, step, count, self.count)
        rows = {}
        for slot, lane in zip(slots.tolist(), lanes.tolist(), strict=True):
            if lane in self.lanes:
                row = self.lanes[lane].row(length)
                if row is None:
                    self.active.discard(lane)
                    self.ended = not self.active
                elif slot in local:
                    rows[slot] = row
        self.count_rows(len(slots), length)
        return rows

    @property
    def packing_stats(self) -> PackingStats:
        packing_stats = (
            lane.packing_stats for lane in self.lanes.values() if isinstance(lane, PackedLane)
        )
        return sum(packing_stats, PackingStats())

    @property
    def epochs(self) -> float:
        return sum(lane.cursor.epochs for lane in self.lanes.values()) / max(len(self.lanes), 1)

    def position(self) -> SourcePosition:
        return SourcePosition(
            contents=self.contents,
            rows=self.rows,
            tokens=self.tokens,
            lane_count=self.count,
            lanes={str(index): lane.position() for index, lane in self.lanes.items()},
        )

    def seek(self, position: SourcePosition) -> None:
        positions = position.lanes or {}
        self.rows = position.rows
        self.tokens = position.tokens
        for index, lane in self.lanes.items():
            lane.seek(positions[str(index)])


def lane_of_each(slots: NDArray[np.int64], step: int, count: int, lanes: int) -> NDArray[np.int64]:
    """The lane of each slot of a step of `count` rows.

    Neighbours in a batch are neighbours in lanes, so that a rank's rows come from few lanes. If
    `count` isn't a multiple of the number of lanes, the lanes take turns; over some steps all give
    the same number of rows.
    """
    unit = math.gcd(count, lanes)
    turn = step % (lanes // unit) * unit
    return (slots * lanes + turn) // count


def lanes_within(slots: range, count: int, lanes: int) -> range:
    """Lanes that these slots may have in steps of `count` rows."""
    if not slots:
        return range(0)
    first = slots.start * lanes // count
    last = ((slots.stop - 1) * lanes + lanes - math.gcd(count, lanes)) // count
    return range(first, last + 1)
