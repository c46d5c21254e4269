"""Documents drawn at random, at a cost that doesn't grow with the data.

Of plain JSON lines, text files and token files, documents are drawn by *places*: a byte or token is
chosen, and the document around it is read. So each is drawn in proportion to its size, which its
weight undoes. Files that can't be read at any place (compressed, Parquet, Arrow, CSV, JSON arrays)
are chosen at random, and their *beginnings* are read; CSV, Arrow and JSON arrays to their end.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.read.corpus import RawDocument
from torchtitan.data.read.opening import BadDocument, FilePool, FileStamp, is_compressed
from torchtitan.data.read.records import BOM, FileRecord, kind_of, read_records
from torchtitan.tools.corpus.columns import WHOLE, Drawn
from torchtitan.utils.limits import RECORD_BYTES

_BLOCK = 2**16
_FILES = 32
"""Files whose beginnings are read, at most."""
_LONG_TEXT = 2**20
"""Of larger text files only a part is read, and the rest taken to be like it."""
_PIECE_BYTES = 2**16
WHOLE_BELOW = 4096
"""Bytes per wanted document below which everything is read."""

Draw = tuple[RawDocument | None, list[Drawn]]
"""A document, or None for a blank line, and each time that it was drawn."""


def draw_items(stamps: Sequence[FileStamp], column: str, count: int, seed: int) -> Iterator[Draw]:
    """About `count` documents of some files.

    Raises:
        OSError: a file can't be read.
        DataError: a file is damaged, or has changed since its stamp was made.
    """
    rng = np.random.default_rng(seed)
    placed = [stamp for stamp in stamps if _is_placed(stamp)]
    others = [stamp for stamp in stamps if not _is_placed(stamp)]
    size = sum(stamp.size for stamp in stamps)
    of_placed = round(count * sum(stamp.size for stamp in placed) / size)
    if placed:
        yield from _random_documents(placed, max(of_placed, 2), rng)
    if others:
        yield from _beginnings(others, column, max(count - of_placed, 1), rng)


def _is_placed(stamp: FileStamp) -> bool:
    path = Path(stamp.path)
    return not is_compressed(path) and kind_of(path, stamp) in ("json", "text")


# ---- places


def draw_positions(
    sizes: Sequence[int], count: int, rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Random places in files of these sizes, each a file's index and an offset, in order."""
    ends = np.cumsum(sizes)
    for position in np.sort(rng.integers(0, ends[-1], count)):
        which = int(np.searchsorted(ends, position, side="right"))
        yield which, int(position - (ends[which - 1] if which else 0))


def _random_documents(
    stamps: Sequence[FileStamp], count: int, rng: np.random.Generator
) -> Iterator[Draw]:
    files = FilePool()
    sizes = [stamp.size for stamp in stamps]
    documents = (
        (stamps[which], *_document_at(files, stamps[which], offset))
        for which, offset in draw_positions(sizes, count, rng)
    )
    unit = 0
    for _, drawn in groupby(documents, key=lambda one: (one[0].path, one[1])):
        (stamp, start, raw, content, scale), *again = drawn
        item = None if content is None else RawDocument(stamp.path, start, content)
        weight = sum(sizes) / count / raw
        units = range(unit, unit + 1 + len(again))
        yield item, [Drawn(weight, raw, one, "places", scale=scale) for one in units]
        unit = units.stop


def _document_at(files: FilePool, stamp: FileStamp, offset: int) -> tuple[int, int, Any, float]:
    """The document around a byte: where it begins, bytes of the file that it takes up, its content
    (None for a blank line), and its size relative to that.
    """
    path = Path(stamp.path)
    if kind_of(path, stamp) == "text":
        if stamp.size <= _LONG_TEXT:
            (record,) = read_records(path, "", stamp=stamp)
            return 0, stamp.size, record.content, 1.0
        length = min(_PIECE_BYTES, stamp.size - offset)
        piece = files.read(stamp.path, offset, length, stamp).decode(errors="ignore")
        return offset, stamp.size, piece or None, stamp.size / max(len(piece.encode()), 1)
    start, line = _line_at(files, stamp, offset)
    content: Any = line.removeprefix(BOM) if start == 0 else line
    if len(line) > RECORD_BYTES:
        content = BadDocument("too long", "longer than a record")
    elif not content or content.isspace():
        content = None
    return start, len(line), content, 1.0


def _line_at(files: FilePool, stamp: FileStamp, offset: int) -> tuple[int, bytes]:
    """The line around a byte: where it begins, and its bytes with the line's end. One that is too
    long to be a document is cut.
    """
    before: list[bytes] = []
    begin = offset
    while begin > 0 and offset - begin <= RECORD_BYTES:
        first = max(begin - _BLOCK, 0)
        block = files.read(stamp.path, first, begin - first, stamp)
        at = block.rfind(b"\n") + 1
        before.append(block[at:])
        begin = first + at
        if at:
            break
    after: list[bytes] = []
    end = offset
    while end < stamp.size and end - begin <= RECORD_BYTES:
        block = files.read(stamp.path, end, min(_BLOCK, stamp.size - end), stamp)
        at = block.find(b"\n") + 1
        after.append(block[:at] if at else block)
        end += len(block)
        if at:
            break
    return begin, b"".join(before[::-1] + after)


# ---- beginnings


def _beginnings(
    stamps: Sequence[FileStamp], column: str, count: int, rng: np.random.Generator
) -> Iterator[Draw]:
    """The first documents of some files, as many of each."""
    chosen = [stamps[i] for i in rng.permutation(len(stamps))[:_FILES]]
    quota = math.ceil(count / len(chosen))
    read = [_Beginning(stamp, column, quota) for stamp in chosen]
    total = sum(stamp.size for stamp in stamps)
    if len(chosen) == len(stamps) and all(beginning.is_whole for beginning in read):
        for beginning in read:
            yield from ((item, [WHOLE]) for item in beginning.items)
        return
    of_chosen = sum(stamp.size for stamp in chosen)
    for unit, (stamp, beginning) in enumerate(zip(chosen, read, strict=True)):
        documents = stamp.size / beginning.raw * total / of_chosen
        for item in beginning.items:
            yield item, [Drawn(documents / len(beginning.items), beginning.raw, unit, "beginnings")]


class _Beginning:
    """The first documents of a file, and how many of its bytes one of them takes up."""

    def __init__(self, stamp: FileStamp, column: str, quota: int):
        path = Path(stamp.path)
        kind = kind_of(path, stamp)
        self.items: list[RawDocument] = []
        self._reads: list[int] = []
        self._quota = quota
        records = read_records(path, column, self._advance, stamp)
        seen, size = self._take(stamp, records, count=kind != "parquet")
        if kind == "parquet":
            seen, size = _rows_of(path), stamp.size
        self.raw = max(size, 1) / max(seen, 1)
        self.is_whole = seen <= len(self.items)
        """Whether the file has no other documents."""

    def _advance(self, size: int) -> None:
        if size:
            self._reads.append(size)

    def _take(
        self, stamp: FileStamp, records: Iterator[FileRecord], *, count: bool
    ) -> tuple[int, int]:
        """Take the first documents; returns how many were read with them, and in how many bytes.

        CSV and Arrow files tell a single read, at their end: they are read as a whole.
        """
        seen = known = 0
        for number, content, _ in records:
            if seen >= self._quota and (not count or len(self._reads) > known):
                return seen, sum(self._reads[:known])
            known = len(self._reads)
            if seen < self._quota:
                self.items.append(RawDocument(stamp.path, number, content))
            seen += 1
        return seen, stamp.size


def _rows_of(path: Path) -> int:
    """The number of rows of a Parquet file, from its end."""
    import pyarrow.parquet

    rows: int = pyarrow.parquet.read_metadata(path).num_rows
    return rows
