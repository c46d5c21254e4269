"""The byte range of each sound document of a local file, to read them in any order.

A file without random access (compressed, Parquet, Arrow, CSV, a JSON array) is copied as plain text
at the same time. Documents that can't be decoded are skipped and counted.
"""

import array
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from torchtitan.data.read.opening import (
    BadDocument,
    FileStamp,
    data_handle,
    full_hash,
    is_compressed,
    open_data,
    sample_hash,
)
from torchtitan.data.read.records import (
    SKIP_ADVICE,
    Conversations,
    decode,
    kind_of,
    read_records,
    record_location,
)
from torchtitan.utils.signals import check_stop

_VERSION = 3
"""Version of the index, and of the definition of a document."""
RANGE_BYTES = 16
"""Bytes of a document in `.ranges`."""
_MAX_BAD = 1000
"""Number of a file's bad documents that the index lists."""


class CachedFile(BaseModel):
    """The stamp and hash of a file of the cache when it was written."""

    size: int
    mtime_ns: int
    inode: int
    sum: str

    def stamp(self, path: Path, hasher: Callable[[int], str]) -> FileStamp:
        """
        Args:
            hasher: makes `sum` of the open file.
        """
        return FileStamp(
            str(path),
            self.size,
            self.mtime_ns,
            self.inode,
            hash=self.sum,
            hasher=hasher,
            copies=True,
        )


class FileIndex(BaseModel):
    """The documents of a file."""

    key: str
    path: str
    size: int
    mtime_ns: int
    inode: int
    sample: str = ""
    """`opening.sample_hash` of the contents."""
    column: str
    chat: str = ""
    """`Chat.fingerprint` if the documents are conversations."""
    kind: str
    """See `records.kind_of`."""
    copied: bool
    """Whether the texts are read from a copy."""
    documents: int = 0
    text_bytes: int = 0
    bad: dict[str, int] = {}
    """Numbers of bad documents, by kind."""
    places: list[tuple[int, str]] = []
    """Number and problem of the first bad documents."""
    ranges: CachedFile | None = None
    """None if they are in memory."""
    texts: CachedFile | None = None
    """None if the texts are read from the file itself."""

    @property
    def stamp(self) -> FileStamp:
        """The file when it was indexed."""
        return FileStamp(self.path, self.size, self.mtime_ns, self.inode, hash=self.sample)

    def cache_files(self, folder: Path) -> dict[str, FileStamp]:
        """Stamps of its files in the cache, by their endings."""
        stamps = {}
        if self.ranges is not None:
            stamps["ranges"] = self.ranges.stamp(folder / f"{self.key}.ranges", full_hash)
        if self.texts is not None:
            stamps["texts"] = self.texts.stamp(folder / f"{self.key}.texts", sample_hash)
        return stamps


def new_index(stamp: FileStamp, column: str, chat: str = "") -> FileIndex:
    """The index of a file that hasn't been read yet."""
    kind = kind_of(Path(stamp.path), stamp)
    copied = kind not in ("json", "text") or is_compressed(Path(stamp.path))
    return FileIndex(
        key=key_of([stamp], column, chat),
        path=stamp.path,
        size=stamp.size,
        mtime_ns=stamp.mtime_ns,
        inode=stamp.inode,
        column=column,
        chat=chat,
        kind=kind,
        copied=copied,
    )


def key_of(stamps: Sequence[FileStamp], column: str, chat: str = "") -> str:
    """A name that changes when the files do. It ignores the inode, see `FileStamp.hash`."""
    files = [(stamp.path, stamp.size, stamp.mtime_ns) for stamp in stamps]
    name = json.dumps([files, column, _VERSION, *([chat] if chat else [])])
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def find_documents(
    index: FileIndex,
    stop: bool,
    ranges: IO[bytes] | None = None,
    texts: IO[bytes] | None = None,
    advance: Callable[[], None] = lambda: None,
    chat: Conversations | None = None,
) -> NDArray[np.int64]:
    """Read a file and complete its index.

    Args:
        stop: whether a bad document is an error.
        ranges: the documents' ranges are written to it instead of returned.
        texts: receives the copy of the texts, if the index needs one.
        advance: called after every document.
        chat: the documents are conversations.

    Returns:
        `[documents, 2]`: the first byte and the end; empty with `ranges`.

    Raises:
        BadDocument: the first bad document, if `stop`; with its file and line.
        Stopped: this process was asked to stop.
    """
    file = Path(index.path)
    with open_data(file, index.stamp) as content:
        index.sample = sample_hash(content.fileno())
    byte_ranges: array.array[int] = array.array("q")
    bad: Counter[str] = Counter()
    for record in read_records(file, index.column, stamp=index.stamp):
        advance()
        check_stop()
        try:
            text = decode(record.content, index.column, chat).encode()
        except BadDocument as error:
            if stop:
                problem = f"{record_location(file, record.number)}: {error}{SKIP_ADVICE}"
                raise BadDocument(error.kind, problem) from None
            if bad.total() < _MAX_BAD:
                index.places.append((record.number, str(error)))
            bad[error.kind] += 1
            continue
        if texts is not None:
            byte_ranges.extend((index.text_bytes, index.text_bytes + len(text)))
            texts.write(text)
        elif index.kind == "text":
            byte_ranges.extend((index.size - len(text), index.size))
        else:
            byte_ranges.extend((record.start, record.start + len(record.content)))
        index.documents += 1
        index.text_bytes += len(text)
        if ranges is not None and len(byte_ranges) > 2**18:
            byte_ranges.tofile(ranges)
            del byte_ranges[:]
    os.close(data_handle(file, index.stamp))  # it hasn't changed in the meantime
    index.bad = dict(bad)
    if ranges is not None:
        byte_ranges.tofile(ranges)
        del byte_ranges[:]
    return np.asarray(byte_ranges, np.int64).reshape(-1, 2)
