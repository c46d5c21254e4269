"""The one global order of rows, whichever rank reads them.

A step consumes G rows (the global batch). A row is `seq_len + 1` token ids; consecutive rows of a
source overlap by one id, so every id is predicted once, also where `seq_len` changes. Missing ids
at the end of finite data are `IGNORE_INDEX`. `mixture` says which rows of a step come from which
source; a source's reader delivers those that its rank reads. The contents of a row depend neither
on the other rows that a rank reads nor on the layout.

    token files   are cut into windows, which are shuffled; `windows` says which of them a row has
    text          the source has L lanes; a lane reads its own documents, one after another, and
                  cuts rows from [bos] text [eos] [bos] text [eos] ...; the position is one small
                  record per lane

The place of a row in its step decides its lane, so a rank needs only the lanes of its own places.
Where ranks share a lane, each reads past the other's rows. Random-access text has as many lanes as
the batch has rows, a stream as many as its shards allow.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.order.mixture import Slots, permute
from torchtitan.data.order.windows import Piece, WindowOrder
from torchtitan.data.positions import DocumentPosition, LanePosition, SourcePosition, StreamPosition
from torchtitan.data.text.retry import Retry
from torchtitan.data.text.texts import Text
from torchtitan.data.tokens.token_files import TokenFiles

IGNORE_INDEX = -100
"""Label of positions that are not predicted."""

Row = NDArray[np.int64]
"""`[seq_len + 1]` token ids, some of which may be flagged (`flags`)."""
Share = tuple[tuple[int, int], ...]
"""The rows of a step that a reader delivers: part `index` of `count` equal parts, of which the next
pair takes a part, and so on.
"""


class SourceReader(ABC):
    """Reads a share of the rows of one source."""

    @abstractmethod
    def read(
        self,
        step: int,
        count: int,
        slots: Slots,
        length: int,
    ) -> dict[int, Row]:
        """This reader's rows of a step by their places. After the source's end, rows are missing.

        Args:
            step: counted from 0.
            count: rows of the step, over all sources and ranks.
            slots: all places of the step whose rows come from this source.
            length: `seq_len` of the step.
        """

    def left(self, length: int) -> int | None:
        """Rows of a length until the source ends; None if it doesn't."""
        return None

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


class TokenReader(SourceReader):
    """Rows of token files."""

    def __init__(
        self,
        files: TokenFiles,
        share: Share,
        seed: int | None,
        order: WindowOrder,
        retry: Retry,
    ):
        """
        Args:
            seed: shuffles the windows of each epoch; None keeps their order.
            order: of the windows of `files`.
        """
        self.files = files
        self.share = share
        self.seed = seed
        self.order = order
        self.retry = retry
        self.rows = self.tokens = 0

    def read(
        self,
        step: int,
        count: int,
        slots: Slots,
        length: int,
    ) -> dict[int, Row]:
        own = own_rows(count, self.share)
        first, after = np.searchsorted(slots, [own.start, own.stop])
        found = self.order.take(len(slots), length, range(first, after))
        self.rows += len(slots)
        self.tokens += len(slots) * length
        return {int(slots[i]): self._row(pieces, length) for i, pieces in found.items()}

    def _row(
        self,
        pieces: Sequence[Piece],
        length: int,
    ) -> Row:
        parts: list[Row] = []
        for piece in pieces:
            ids = self._ids(piece)
            # Of a further piece, only what is predicted: the id before it may be in another row.
            parts.append(ids[1:] if any(map(len, parts)) else ids)
        return _padded(np.concatenate(parts), length)

    def _ids(self, piece: Piece) -> Row:
        epoch, window = divmod(piece.window, len(self.files))
        if self.seed is not None:
            window = permute(
                window,
                len(self.files),
                self.seed,
                epoch,
            )
        return self.retry(
            f"window {window}", lambda: self.files.window(window, piece.first, piece.after)
        )

    def left(self, length: int) -> int | None:
        return self.order.left(length)

    @property
    def epochs(self) -> float:
        return self.order.read / (len(self.files) * self.files.width)

    def position(self) -> SourcePosition:
        return SourcePosition(
            contents=self.files.contents.fingerprint,
            rows=self.rows,
            tokens=self.tokens,
            windows=self.order.position(),
        )

    def seek(self, position: SourcePosition) -> None:
        assert position.windows is not None
        assert position.tokens is not None
        self.rows = position.rows
        self.tokens = position.tokens
        self.order.seek(position.windows)


class Cursor(Protocol):
    """The sequence of documents of a lane."""

    @property
    def epochs(self) -> float:
        """How often the lane's documents have been read."""

    def next(self) -> Text | None:
        """The next document; None at the end of a finite pass."""

    def position(self) -> DocumentPosition | StreamPosition: ...

    def seek(self, position: Any) -> None:
        """Continue from what `position` of such a cursor returned."""


class DocumentEncoder(Protocol):
    """Makes documents ids: a tokenizer, or one with its chat template."""

    def encode_in_pieces(self, text: Text, start: int = 0) -> Iterator[tuple[int, Row]]:
        """See `Tokenizer.encode_in_pieces`."""


class Lane:
    """Cuts rows from a cursor's documents.

    Its position is the cursor's before the current document and the offset in that document, which
    is tokenized again. A long document is tokenized in pieces; the offset then counts from the
    current piece, whose start is part of the position.
    """

    def __init__(
        self,
        cursor: Cursor,
        encoder: DocumentEncoder,
    ):
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
        """The next row of `length + 1` ids, padded where the data ends; None after that."""
        parts: list[Row] = []
        missing = length + 1
        while missing:
            if self.ids is None and not self._read():
                break
            assert self.ids is not None
            part = self.ids[self.offset : self.offset + missing]
            parts.append(part)
            missing -= len(part)
            self.offset += len(part)
            if missing:
                self.ids = None
        if missing >= length:  # only the last row's last id is left
            return None
        # The next row begins with this row's last id.
        self.offset -= 1
        return _padded(np.concatenate(parts), length)

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
        return LanePosition(
            cursor=self.before,
            offset=self.offset,
            position=self.start,
        )

    def seek(self, position: LanePosition) -> None:
        self.cursor.seek(position.cursor)
        self.before = position.cursor
        self.ids = None
        self.pieces = iter(())
        if position.offset >= 0 and self._read(position.position):
            self.offset = position.offset


class LaneReader(SourceReader):
    """Rows of text, cut from lanes."""

    def __init__(
        self,
        contents: str,
        share: Share,
        lanes: dict[int, Lane],
        count: int,
    ):
        """
        Args:
            contents: fingerprint of the source.
            lanes: those with any row of the share.
            count: number of lanes of the source.
        """
        self.contents = contents
        self.share = share
        self.lanes = lanes
        self.count = count
        self.rows = self.tokens = 0

    def read(
        self,
        step: int,
        count: int,
        slots: Slots,
        length: int,
    ) -> dict[int, Row]:
        own = own_rows(count, self.share)
        lanes = lanes_of(
            slots,
            step,
            count,
            self.count,
        )
        rows = {}
        for slot, lane in zip(slots.tolist(), lanes.tolist(), strict=True):
            if lane in self.lanes:
                row = self.lanes[lane].row(length)
                if slot in own and row is not None:
                    rows[slot] = row
        self.rows += len(slots)
        self.tokens += len(slots) * length
        return rows

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
        saved = position.lanes or {}
        assert position.tokens is not None
        self.rows = position.rows
        self.tokens = position.tokens
        for index, lane in self.lanes.items():
            lane.seek(saved[str(index)])


def lanes_of(
    slots: Slots,
    step: int,
    count: int,
    lanes: int,
) -> Slots:
    """The lane of each place of a step of `count` rows.

    Neighbours in a batch are neighbours in lanes, so that a rank's rows come from few lanes. If
    `count` isn't a multiple of the number of lanes, the lanes take turns; over some steps all give
    the same number of rows.
    """
    unit = math.gcd(count, lanes)
    turn = step % (lanes // unit) * unit
    return (slots * lanes + turn) // count


def lanes_within(
    own: range,
    count: int,
    lanes: int,
) -> range:
    """Lanes that any of the places `own` of steps of `count` rows may have."""
    if not own:
        return range(0)
    first = own.start * lanes // count
    last = ((own.stop - 1) * lanes + lanes - math.gcd(count, lanes)) // count
    return range(first, last + 1)


def own_rows(count: int, share: Share) -> range:
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


def _padded(ids: Row, seq_len: int) -> Row:
    return np.pad(ids, (0, seq_len + 1 - len(ids)), constant_values=IGNORE_INDEX)
