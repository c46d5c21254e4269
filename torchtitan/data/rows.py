"""The one global order of rows, whichever rank reads them.

A step consumes G rows (the global batch). A row is `seq_len + 1` token ids; consecutive rows overlap by one id, so
every id is predicted once. Missing ids at the end of finite data are `IGNORE_INDEX`. A reader delivers a range of the
step's rows; the contents of a row depend neither on that range nor on the layout.

    token files   row r of step s is window permutation(s * G + r); the position is one number
    text          G rows are spread over L lanes; a lane reads its own documents, one after another, and cuts rows from
                  [bos] text [eos] [bos] text [eos] ...; the position is one small record per lane

Random-access text has one lane per row. A stream has as many as its shards allow; a reader that needs only some rows
of a lane reads past the others.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.documents import Documents
from torchtitan.data.records import FileText, Text
from torchtitan.data.retry import Retry
from torchtitan.data.shuffle import permute
from torchtitan.data.token_files import TokenFiles
from torchtitan.data.tokenizer import Tokenizer

IGNORE_INDEX = -100
"""Label of positions that are not predicted."""

Row = NDArray[np.int64]


class RowReader(ABC):
    """Reads some rows of every step, in order."""

    @abstractmethod
    def step(self) -> list[Row] | None:
        """The next step's rows; None at the end of a finite pass."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Position after the last step. `merge_states` joins the readers' positions."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a merged position."""

    def steps(self) -> Iterator[tuple[list[Row], dict[str, Any]]]:
        """The rows of each remaining step, and the position after it."""
        while (rows := self.step()) is not None:
            yield rows, self.state_dict()


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The layout-free position that the positions of all readers of a step make up."""
    lanes: dict[str, Any] = {}
    for state in states:
        lanes |= state.get("lanes", {})
    return states[0] | ({"lanes": lanes} if "lanes" in states[0] else {})


def skipped_until(state: dict[str, Any]) -> Counter[str]:
    """Bad documents that the lanes of a merged position have passed over, by kind."""
    cursors = [lane["cursor"] for lane in state.get("lanes", {}).values()]
    return sum((Counter(cursor.get("skipped", {})) for cursor in cursors), Counter[str]())


class TokenReader(RowReader):
    """Rows of token files."""

    def __init__(self, files: TokenFiles, rows: range, rows_per_step: int, seed: int, infinite: bool, retry: Retry):
        self.files, self.rows, self.per_step, self.seed, self.infinite = files, rows, rows_per_step, seed, infinite
        self.retry = retry
        self.consumed = 0

    def step(self) -> list[Row] | None:
        first = self.consumed + (self.rows[0] if len(self.rows) else 0)
        if not self.infinite and first >= len(self.files):
            return None
        out = [self._row(self.consumed + row) for row in self.rows]
        self.consumed += self.per_step
        return out

    def _row(self, index: int) -> Row:
        epoch, slot = divmod(index, len(self.files))
        if not self.infinite:
            return _padded(self._window(slot), self.files.seq_len) if epoch == 0 else blank_row(self.files.seq_len)
        return _padded(self._window(permute(slot, len(self.files), self.seed, epoch)), self.files.seq_len)

    def _window(self, index: int) -> Row:
        return self.retry(f"window {index}", lambda: self.files.window(index))

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed"]


class Cursor(Protocol):
    """The sequence of documents of a lane."""

    def next(self) -> Text | None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DocumentCursor:
    """Documents lane, lane + L, lane + 2L, ... of the concatenated epochs, each shuffled differently."""

    def __init__(self, documents: Documents, lane: int, lanes: int, seed: int, infinite: bool, retry: Retry):
        self.documents, self.position, self.lanes, self.seed = documents, lane, lanes, seed
        self.infinite, self.retry = infinite, retry

    def next(self) -> Text | None:
        epoch, slot = divmod(self.position, len(self.documents))
        if epoch and not self.infinite:
            return None
        self.position += self.lanes
        index = permute(slot, len(self.documents), self.seed, epoch) if self.infinite else slot
        what = f"document {index}"
        text = self.retry(what, lambda: self.documents[index])
        if isinstance(text, FileText):
            text.attempt = partial(self.retry, what)
        return text

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Lane:
    """Cuts rows from a cursor's documents.

    Its state is the cursor's before the current document and the offset in that document, which is tokenized again. A
    long document is tokenized in pieces: then the offset is one in the piece, and the state has its position, too.
    """

    def __init__(self, cursor: Cursor, tokenizer: Tokenizer, seq_len: int):
        self.cursor, self.tokenizer, self.seq_len = cursor, tokenizer, seq_len
        self.before: dict[str, Any] = cursor.state_dict()
        self.document: Row | None = None
        """The ids of the current document, or of a piece of it."""
        self.offset = self.position = 0
        self.pieces: Iterator[tuple[int, Row]] = iter(())

    def row(self) -> Row | None:
        """The next row, padded where the data ends; None after that."""
        parts: list[Row] = []
        missing = self.seq_len + 1
        while missing:
            if self.document is None and not self._read():
                break
            assert self.document is not None
            part = self.document[self.offset : self.offset + missing]
            parts.append(part)
            missing -= len(part)
            self.offset += len(part)
            if missing:
                self.document = None
        if missing >= self.seq_len:  # only the last row's last id is left
            return None
        # The next row begins with this row's last id.
        self.offset -= 1
        return _padded(np.concatenate(parts), self.seq_len)

    def _read(self, start: int = 0) -> bool:
        """Get the next piece, or else the next document from position `start` on."""
        if (piece := next(self.pieces, None)) is None:
            before = self.cursor.state_dict()
            text = self.cursor.next()
            if text is None:
                return False
            self.before, self.pieces = before, self.tokenizer.encode_in_pieces(text, start)
            piece = next(self.pieces)
        (self.position, self.document), self.offset = piece, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        position = {"position": self.position} if self.document is not None and self.position else {}
        return {"cursor": self.before, "offset": self.offset if self.document is not None else -1} | position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state["cursor"])
        self.document, self.pieces = None, iter(())
        if state["offset"] >= 0 and self._read(state.get("position", 0)):
            self.offset = state["offset"]


class LaneReader(RowReader):
    """Rows of text: of each step, `rows_per_lane` consecutive ones from each lane."""

    def __init__(self, lanes: dict[int, Lane], rows: range, rows_per_lane: int):
        self.lanes, self.rows, self.rows_per_lane = lanes, rows, rows_per_lane

    def step(self) -> list[Row] | None:
        out: list[Row] = []
        left = False
        for index, lane in self.lanes.items():
            for row in range(index * self.rows_per_lane, (index + 1) * self.rows_per_lane):
                ids = lane.row()
                left |= ids is not None
                if row in self.rows:
                    out.append(blank_row(lane.seq_len) if ids is None else ids)
        return out if left else None

    def state_dict(self) -> dict[str, Any]:
        return {"lanes": {str(index): lane.state_dict() for index, lane in self.lanes.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, lane in self.lanes.items():
            lane.load_state_dict(state["lanes"][str(index)])


def lanes_of(rows: range, rows_per_lane: int) -> range:
    """Lanes that hold any of `rows`."""
    return range(rows.start // rows_per_lane, -(-rows.stop // rows_per_lane)) if len(rows) else range(0)


def split_rows(rows: range, count: int) -> list[range]:
    """`rows` in `count` consecutive parts, as even as possible."""
    cuts = [rows.start + len(rows) * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def blank_row(seq_len: int) -> Row:
    """A row without labels."""
    return np.full(seq_len + 1, IGNORE_INDEX)


def _padded(ids: Row, seq_len: int) -> Row:
    return np.pad(ids, (0, seq_len + 1 - len(ids)), constant_values=IGNORE_INDEX)
