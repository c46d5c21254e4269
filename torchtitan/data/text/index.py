"""The range of bytes of each sound document of a local file, to read them in any order.

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

from torchtitan.data.text.chat import Chat
from torchtitan.data.text.opening import FileStamp, is_compressed, open_data, sample, whole
from torchtitan.data.text.records import SKIP_ADVICE, decode, kind_of, place, read_records
from torchtitan.data.text.texts import BadDocument, Text, parts_of

_VERSION = 2
"""Version of the index, and of what counts as a document."""
RANGE = 16
"""Bytes of a document in `.ranges`."""
_PLACES = 1000
"""Number of a file's bad documents whose places are kept."""


class KeptFile(BaseModel):
    """A file of the cache, as it was written."""

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
            str(path), self.size, self.mtime_ns, self.inode, self.sum, hasher, copies=True
        )


class FileIndex(BaseModel):
    """The documents of a file."""

    key: str
    path: str
    size: int
    mtime_ns: int
    inode: int
    sample: str = ""
    """`opening.sample` of the contents."""
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
    """Numbers of documents left out, by kind."""
    places: list[tuple[int, str]] = []
    """Number and problem of the first documents left out."""
    ranges: KeptFile | None = None
    """None if they are in memory."""
    texts: KeptFile | None = None
    """None if the texts are read from the file itself."""

    @property
    def stamp(self) -> FileStamp:
        """The file when it was indexed."""
        return FileStamp(self.path, self.size, self.mtime_ns, self.inode, self.sample)

    def kept(self, folder: Path) -> dict[str, FileStamp]:
        """The files of the cache that belong to it, by their endings."""
        found = {}
        if self.ranges is not None:
            found["ranges"] = self.ranges.stamp(folder / f"{self.key}.ranges", whole)
        if self.texts is not None:
            found["texts"] = self.texts.stamp(folder / f"{self.key}.texts", sample)
        return found


def new_index(stamp: FileStamp, column: str, chat: str = "") -> FileIndex:
    """The index of a file, before its documents are looked for."""
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
    """A name that changes when the files do. The inode is left out, see `FileStamp.hash`."""
    named = [(stamp.path, stamp.size, stamp.mtime_ns) for stamp in stamps]
    name = json.dumps([named, column, _VERSION, *([chat] if chat else [])])
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def find_documents(
    index: FileIndex,
    stop: bool,
    ranges: IO[bytes] | None = None,
    texts: IO[bytes] | None = None,
    advance: Callable[[], None] = lambda: None,
    chat: Chat | None = None,
) -> NDArray[np.int64]:
    """Read a file and complete its index.

    Args:
        stop: whether a bad document is an error.
        ranges: the documents' ranges are written to it instead of returned.
        texts: takes the copy of the texts, if one is needed.
        advance: called after every document.
        chat: the documents are conversations.

    Returns:
        `[documents, 2]`: the first byte and the one after the last; empty with `ranges`.

    Raises:
        BadDocument: the first bad document, if `stop`; with its file and line.
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
            text = decode(record.content, index.column, chat)
            length = _utf8_bytes(text) if texts is None else _copy(text, texts, written)
        except BadDocument as error:
            if stop:
                problem = f"{place(file, record.number)}: {error}{SKIP_ADVICE}"
                raise BadDocument(error.kind, problem) from None
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
        index.documents += 1
        index.text_bytes += length
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
    return sum(len(part) if part.isascii() else len(part.encode()) for part in parts_of(text))


def _copy(text: Text, file: IO[Any], start: int) -> int:
    """Write a text at `start`, over a bad one that may have been begun there; its bytes."""
    file.seek(start)
    for part in parts_of(text):
        file.write(part.encode())
    return file.tell() - start
