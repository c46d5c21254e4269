"""The one global order of rows, whoever reads them.

A step consumes G rows (the global batch). A row is `seq_len + 1` token ids; consecutive rows overlap by one id, so that
each id is predicted once. Missing ids at the end of finite data are `IGNORE_INDEX`. A reader is given the range of the
step's rows that it is to deliver; what a row contains does not depend on that range, hence not on the layout.

    token files   row r of step s is window permutation(s * G + r); the position is one number
    text          G rows are spread over L lanes; a lane reads documents of its own, one after another, and cuts rows
                  out of [bos] text [eos] [bos] text [eos] ...; the position is one small record per lane

Random-access text has a lane per row. A stream has as many as its shards allow; a reader that needs only some of a
lane's rows walks through the others too.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.documents import Documents
from torchtitan.data.retry import Retry
from torchtitan.data.shuffle import permute
from torchtitan.data.token_files import TokenFiles
from torchtitan.data.tokenizer import Tokenizer

IGNORE_INDEX = -100
"""Label of positions that are not predicted."""

Row = NDArray[np.int64]


class RowReader(ABC):
    """Delivers some rows of every step, in order."""

    @abstractmethod
    def step(self) -> list[Row] | None:
        """The next step's rows; None once all data of a finite pass is used up."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Position after the last step delivered. Readers' records merge by `merge_states`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a merged position."""


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One layout-free position out of what the readers of the same step report."""
    lanes: dict[str, Any] = {}
    for state in states:
        lanes |= state.get("lanes", {})
    return states[0] | ({"lanes": lanes} if "lanes" in states[0] else {})


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
            return _padded(self._window(slot) if epoch == 0 else np.empty(0, np.int64), self.files.seq_len)
        return _padded(self._window(permute(slot, len(self.files), self.seed, epoch)), self.files.seq_len)

    def _window(self, index: int) -> Row:
        return self.retry(f"window {index}", lambda: self.files.window(index))

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed"]


class Cursor(Protocol):
    """A lane's sequence of documents."""

    def next(self) -> str | None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DocumentCursor:
    """Documents lane, lane + L, lane + 2L, ... of the concatenated epochs, each epoch in an order of its own."""

    def __init__(self, documents: Documents, lane: int, lanes: int, seed: int, infinite: bool, retry: Retry):
        self.documents, self.position, self.lanes, self.seed = documents, lane, lanes, seed
        self.infinite, self.retry = infinite, retry

    def next(self) -> str | None:
        epoch, slot = divmod(self.position, len(self.documents))
        if epoch and not self.infinite:
            return None
        self.position += self.lanes
        index = permute(slot, len(self.documents), self.seed, epoch) if self.infinite else slot
        return self.retry(f"document {index}", lambda: self.documents[index])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Lane:
    """Cuts rows out of a cursor's documents.

    Its state is the cursor's before the current document, and the place in it: the rest is made again from the text.
    """

    def __init__(self, cursor: Cursor, tokenizer: Tokenizer, seq_len: int):
        self.cursor, self.tokenizer, self.seq_len = cursor, tokenizer, seq_len
        self.before: dict[str, Any] = cursor.state_dict()
        self.document: Row | None = None
        self.offset = 0

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
        if missing >= self.seq_len:  # at most the one id that was predicted already
            return None
        # The last id is an input only; the next row begins with it.
        self.offset -= 1
        return _padded(np.concatenate(parts), self.seq_len)

    def _read(self) -> bool:
        before = self.cursor.state_dict()
        text = self.cursor.next()
        if text is None:
            return False
        self.before, self.offset = before, 0
        self.document = np.asarray(self.tokenizer.encode_document(text), np.int64)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.before, "offset": self.offset if self.document is not None else -1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state["cursor"])
        self.document = None
        if state["offset"] >= 0 and self._read():
            self.offset = state["offset"]


class LaneReader(RowReader):
    """Rows of text, `rows_per_lane` consecutive ones of each step from each lane."""

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
                    out.append(_padded(np.empty(0, np.int64), lane.seq_len) if ids is None else ids)
        return out if left else None

    def state_dict(self) -> dict[str, Any]:
        return {"lanes": {str(index): lane.state_dict() for index, lane in self.lanes.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, lane in self.lanes.items():
            lane.load_state_dict(state["lanes"][str(index)])


def lanes_of(rows: range, rows_per_lane: int) -> range:
    """Lanes that hold any of `rows`."""
    return range(rows.start // rows_per_lane, -(-rows.stop // rows_per_lane)) if len(rows) else range(0)


def _padded(ids: Row, seq_len: int) -> Row:
    return np.pad(ids, (0, seq_len + 1 - len(ids)), constant_values=IGNORE_INDEX)
