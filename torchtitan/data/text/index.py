"""Where the sound documents of a local file are: the range of bytes of each, so that they can be
read in any order.

A file that can't be read at any place (compressed, Parquet, Arrow, CSV, a JSON array) is copied as
plain text at the same time. Documents that can't be decoded are left out and counted.
"""

import array
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from torchtitan.data.text.files import FileStamp, is_compressed, open_data
from torchtitan.data.text.identity import sample
from torchtitan.data.text.records import SKIP_ADVICE, decode, kind_of, place, read_records
from torchtitan.data.text.texts import BadDocument, LongText, Text

_VERSION = 2
"""Of what is kept of a file, and of what counts as a document."""
RANGE = 16
"""Bytes of a document in `.ranges`."""
_PLACES = 1000
"""Bad documents of a file whose places are kept."""


class KeptFile(BaseModel):
    """A file of the cache, as it was written."""

    size: int
    mtime_ns: int
    inode: int
    sum: str


class FileIndex(BaseModel):
    """What a file holds."""

    key: str
    path: str
    size: int
    mtime_ns: int
    inode: int
    sample: str = ""
    """Of its contents."""
    column: str
    kind: str
    """`records.kind_of` the file."""
    copied: bool
    """Whether the texts are read from the copy."""
    documents: int = 0
    text_bytes: int = 0
    bad: dict[str, int] = {}
    """Documents left out, by kind."""
    places: list[tuple[int, str]] = []
    """Number and problem of the first of them."""
    ranges: KeptFile | None = None
    """None if they are in memory."""
    texts: KeptFile | None = None
    """None if the texts are read from the file itself."""

    @property
    def stamp(self) -> FileStamp:
        """What the file was when it was indexed."""
        return FileStamp(self.path, self.size, self.mtime_ns, self.inode, self.sample)


def new_index(stamp: FileStamp, column: str) -> FileIndex:
    """The index of a file, before its documents are looked for."""
    kind = kind_of(Path(stamp.path), stamp)
    copied = kind not in ("json", "text") or is_compressed(Path(stamp.path))
    return FileIndex(
        key=key_of([stamp], column), kind=kind, copied=copied, column=column, **vars(stamp)
    )


def key_of(stamps: Sequence[FileStamp], column: str) -> str:
    """Names what is kept of files: it changes when they do. The inode is left out, see
    `FileStamp.sample`.
    """
    named = [(stamp.path, stamp.size, stamp.mtime_ns) for stamp in stamps]
    name = json.dumps([named, column, _VERSION])
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def find_documents(
    index: FileIndex,
    stop: bool,
    ranges: IO[bytes] | None = None,
    texts: IO[bytes] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> NDArray[np.int64]:
    """Read a file and complete its index.

    Args:
        stop: whether a bad document is an error.
        ranges: takes the documents' ranges instead of their being returned.
        texts: takes the copy of the texts, if there is to be one.
        advance: called after every document.

    Returns:
        `[documents, 2]`, first byte and the one after the last; none if `ranges` took them.

    Raises:
        BadDocument: the first one, if `stop`; with its file and line.
    """
    file = Path(index.path)
    with open_data(file, index.stamp) as content:
        index.sample = sample(content.fileno())
    found: array.array[int] = array.array("q")
    bad: Counter[str] = Counter()
    written = 0
    for record in read_records(file, index.column, stamp=index.stamp):
        advance()
        try:
            text = decode(record.content, index.column)
            length = _utf8_bytes(text) if texts is None else _copy(text, texts, written)
        except BadDocument as error:
            if stop:
                raise BadDocument(
                    error.kind, f"{place(file, record.number)}: {error}{SKIP_ADVICE}"
                ) from None
            if bad.total() < _PLACES:
                index.places.append((record.number, str(error)))
            bad[error.kind] += 1
            continue
        if texts is not None:
            found.extend((written, written + length))
            written += length
        elif index.kind == "text":
            found.extend((index.size - length, index.size))
        else:
            found.extend((record.start, record.start + len(record.content)))
        index.documents = index.documents + 1
        index.text_bytes = index.text_bytes + length
        if ranges is not None and len(found) > 2**18:
            found.tofile(ranges)
            del found[:]
    index.bad = dict(bad)
    if ranges is not None:
        found.tofile(ranges)
        del found[:]
    if texts is not None:
        texts.truncate(written)
    return np.asarray(found, np.int64).reshape(-1, 2)


def _utf8_bytes(text: Text) -> int:
    if isinstance(text, LongText):
        return sum(map(_utf8_bytes, text.parts()))
    return len(text) if text.isascii() else len(text.encode())


def _copy(text: Text, file: IO[Any], start: int) -> int:
    """Write a text at `start`, where one that turned out to be bad may have been begun."""
    file.seek(start)
    for part in text.parts() if isinstance(text, LongText) else [text]:
        file.write(part.encode())
    return file.tell() - start
