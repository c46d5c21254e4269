"""Documents drawn at random, at a cost that doesn't grow with the data.

Documents of plain JSON lines, text files and token files are drawn by *places*: a byte or token is
chosen, and the document around it is read. The chance of a document is proportional to its size,
and its weight corrects for that. Files without random access (compressed, Parquet, Arrow, CSV, JSON
arrays) are chosen at random, and their *beginnings* are read; CSV, Arrow and JSON arrays whole.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.read.corpus import RawDocument
from torchtitan.data.read.opening import BadDocument, FilePool, FileStamp, is_compressed
from torchtitan.data.read.records import FileRecord, kind_of, read_records
from torchtitan.tools.corpus.columns import WHOLE, Drawn
from torchtitan.utils.files import BOM
from torchtitan.utils.limits import RECORD_BYTES

_BLOCK = 2**16
_FILES = 32
"""Maximum number of files whose beginnings are read."""
_LONG_TEXT = 2**20
"""Text files above this size are read in part, and scaled to their whole size."""
_CHUNK_BYTES = 2**16
WHOLE_BELOW = 4096
"""Everything is read if there are fewer bytes than this per document of the sample."""

Draw = tuple[RawDocument | None, list[Drawn]]
"""A document (None for a blank line), and its sampling data for each time it was drawn."""


def draw_items(stamps: Sequence[FileStamp], column: str, count: int, seed: int) -> Iterator[Draw]:
    """Draw about `count` documents from these files.

    Raises:
        OSError: a file can't be read.
        DataError: a file is damaged, or has changed since its stamp was made.
    """
    rng = np.random.default_rng(seed)
    placed = [stamp for stamp in stamps if _is_placed(stamp)]
    others = [stamp for stamp in stamps if not _is_placed(stamp)]
    size = sum(stamp.size for stamp in stamps)
    placed_count = round(count * sum(stamp.size for stamp in placed) / size)
    if placed:
        yield from _random_documents(placed, max(placed_count, 2), rng)
    if others:
        yield from _beginnings(others, column, max(count - placed_count, 1), rng)


def _is_placed(stamp: FileStamp) -> bool:
    path = Path(stamp.path)
    return not is_compressed(path) and kind_of(path, stamp) in ("json", "text")


# ---- places


def draw_positions(
    sizes: Sequence[int], count: int, rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Random positions in files of these sizes, in order: each a file's index and an offset."""
    ends = np.cumsum(sizes)
    for position in np.sort(rng.integers(0, ends[-1], count)):
        file_index = int(np.searchsorted(ends, position, side="right"))
        yield file_index, int(position - (ends[file_index - 1] if file_index else 0))


def _random_documents(
    stamps: Sequence[FileStamp], count: int, rng: np.random.Generator
) -> Iterator[Draw]:
    files = FilePool()
    sizes = [stamp.size for stamp in stamps]
    documents = (
        (stamps[file_index], *_document_at(files, stamps[file_index], offset))
        for file_index, offset in draw_positions(sizes, count, rng)
    )
    next_unit = 0
    for _, drawn in groupby(documents, key=lambda document: (document[0].path, document[1])):
        (stamp, start, raw, content, scale), *repeats = drawn
        item = None if content is None else RawDocument(stamp.path, start, content)
        weight = sum(sizes) / count / raw
        units = range(next_unit, next_unit + 1 + len(repeats))
        yield item, [Drawn(weight, raw, unit, "places", scale=scale) for unit in units]
        next_unit = units.stop


def _document_at(files: FilePool, stamp: FileStamp, offset: int) -> tuple[int, int, Any, float]:
    """The document around a byte: its offset, its bytes in the file, its content (None for a blank
    line), and its size relative to the content.
    """
    path = Path(stamp.path)
    if kind_of(path, stamp) == "text":
        if stamp.size <= _LONG_TEXT:
            (record,) = read_records(path, "", stamp=stamp)
            return 0, stamp.size, record.content, 1.0
        length = min(_CHUNK_BYTES, stamp.size - offset)
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
    """The line around a byte: its offset and its bytes with the newline; too long a line is cut."""
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
    """The first documents of random files, the same number from each."""
    chosen = [stamps[i] for i in rng.permutation(len(stamps))[:_FILES]]
    quota = math.ceil(count / len(chosen))
    read = [_Beginning(stamp, column, quota) for stamp in chosen]
    total = sum(stamp.size for stamp in stamps)
    if len(chosen) == len(stamps) and all(beginning.is_whole for beginning in read):
        for beginning in read:
            yield from ((item, [WHOLE]) for item in beginning.items)
        return
    chosen_size = sum(stamp.size for stamp in chosen)
    for unit, (stamp, beginning) in enumerate(zip(chosen, read, strict=True)):
        documents = stamp.size / beginning.raw * total / chosen_size
        for item in beginning.items:
            yield item, [Drawn(documents / len(beginning.items), beginning.raw, unit, "beginnings")]


class _Beginning:
    """The first documents of a file, and the mean size of a document in it."""

    def __init__(self, stamp: FileStamp, column: str, quota: int):
        path = Path(stamp.path)
        kind = kind_of(path, stamp)
        self.items: list[RawDocument] = []
        self._reads: list[int] = []
        self._quota = quota
        records = read_records(path, column, self._advance, stamp)
        seen, size = self._take(stamp, records, count=kind != "parquet")
        if kind == "parquet":
            import pyarrow.parquet

            seen, size = pyarrow.parquet.read_metadata(path).num_rows, stamp.size
        self.raw = max(size, 1) / max(seen, 1)
        self.is_whole = seen <= len(self.items)
        """Whether the file has no other documents."""

    def _advance(self, size: int) -> None:
        if size:
            self._reads.append(size)

    def _take(
        self, stamp: FileStamp, records: Iterator[FileRecord], *, count: bool
    ) -> tuple[int, int]:
        """Take the first documents; returns the number of documents read and their bytes.

        CSV and Arrow files report one read at their end, so they are read whole.
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
