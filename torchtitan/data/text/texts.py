"""A document as its file holds it (`Record`), and texts too long to be handled in one piece."""

import codecs
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import IO, Any, NamedTuple

from torchtitan.data.text.opening import FileStamp, is_compressed, is_damage, open_plain
from torchtitan.data.text.retry import DataError

BLOCK = 2**20
"""Bytes or characters that are read or handed on at once."""
LONG = 4 * 2**20
"""Longer texts, in bytes or characters, are handed on in parts."""
BOM = b"\xef\xbb\xbf"


class BadDocument(DataError):
    """A document that can't be decoded, or has no text."""

    def __init__(self, kind: str, problem: str):
        super().__init__(problem)
        self.kind = kind
        """The kind that `run.json` counts."""

    def __reduce__(self) -> tuple[type["BadDocument"], tuple[str, str]]:
        return BadDocument, (self.kind, str(self))


class LongText(ABC):
    """A text that is read in parts, as often as needed. Positions in it are bytes or characters."""

    @abstractmethod
    def parts(self, start: int = 0) -> Iterator[str]:
        """The text from position `start` on.

        Raises:
            BadDocument: it isn't UTF-8, or can't be decoded.
        """

    def size(self, part: str) -> int:
        """How far `part` advances the position."""
        return len(part.encode())

    def __str__(self) -> str:
        return "".join(self.parts())


Text = str | LongText


def parts_of(text: Text) -> Iterable[str]:
    return [text] if isinstance(text, str) else text.parts()


class HeldText(LongText):
    """A long text in memory, whose tokens would take many times its size."""

    def __init__(self, text: str):
        self.text = text

    def parts(self, start: int = 0) -> Iterator[str]:
        for begin in range(start, len(self.text), BLOCK):
            yield self.text[begin : begin + BLOCK]

    def size(self, part: str) -> int:
        return len(part)


class HeldBytes(LongText):
    """A long text in memory as UTF-8, decoded while it is read."""

    def __init__(self, content: Any):
        """
        Args:
            content: has the buffer protocol, as `bytes` and `pyarrow.Buffer` do. It isn't copied.
        """
        self.content = content

    def __len__(self) -> int:
        return memoryview(self.content).nbytes

    def parts(self, start: int = 0) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        content = memoryview(self.content)
        for begin in range(start, len(content), BLOCK):
            end = min(begin + BLOCK, len(content))
            try:
                text = decoder.decode(content[begin:end], final=end == len(content))
            except UnicodeDecodeError as error:
                raise not_utf8(error, end - len(error.object)) from None
            if text:
                yield text


class FileText(LongText):
    """Bytes `start` to `end` (None: all) of a file's decompressed contents, as UTF-8."""

    def __init__(
        self, path: str, start: int = 0, end: int | None = None, stamp: FileStamp | None = None
    ):
        """
        Args:
            stamp: of the file when its documents were found.
        """
        self.path = Path(path)
        self.start = start
        self.end = end
        self.stamp = stamp
        self.attempt: Callable[[Callable[[], Any]], Any] = operator.call
        """Opens the file or reads from it, again if that fails."""

    def parts(self, start: int = 0) -> Iterator[str]:
        """
        Raises:
            BadDocument: it isn't UTF-8, or is damaged.
            DataError: the file has changed.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        line = 1
        with self.attempt(partial(open_plain, self.path, stamp=self.stamp)) as file:
            place = file.seek(self.start + start) if self.start + start else 0
            while True:
                wanted = BLOCK if self.end is None else min(BLOCK, self.end - place)
                try:
                    block = self.attempt(partial(_read_at, file, place, wanted))
                    if self.stamp is not None and not is_compressed(self.path):
                        self.stamp.check(file.fileno())
                    content = block if place else block.removeprefix(BOM)
                    place += len(block)
                    text = decoder.decode(content, final=not block)
                except UnicodeDecodeError as error:
                    line += error.object[: error.start].count(b"\n")
                    raise not_utf8(error, place - len(error.object), f"line {line}: ") from None
                except Exception as error:
                    if is_damage(error):
                        raise damaged(error) from None
                    raise
                if text:
                    line += text.count("\n")
                    yield text
                if not block:
                    return


def _read_at(file: IO[bytes], place: int, size: int) -> bytes:
    if file.tell() != place:  # after an attempt that failed
        file.seek(place)
    return file.read(size)


class Record(NamedTuple):
    """A document as it lies in its file."""

    number: int
    """Number of its line, entry or row, counted from 1."""
    content: Any
    """A JSON line (bytes), an array's entry or a row (dict), a text file (`FileText`), or the
    `BadDocument` in its place.
    """
    start: int = -1
    """First byte of a JSON line in the decompressed file."""


def not_utf8(error: UnicodeDecodeError, offset: int = 0, where: str = "") -> BadDocument:
    """
    Args:
        offset: place of the decoded bytes in the document.
        where: the start of the message.
    """
    byte = f"0x{error.object[error.start]:02x}, {error.reason}"
    at = offset + error.start + 1
    return BadDocument("not UTF-8", f"{where}not UTF-8: {byte} at byte {at}")


def damaged(error: BaseException) -> BadDocument:
    return BadDocument(
        "damaged compression", f"can't be decompressed from here on (cut off?): {error}"
    )


def missing_column(column: str, names: Iterable[object]) -> BadDocument:
    """The error about a document without the column of the text."""
    has = ", ".join(map(str, names)) or "none"
    advice = (
        "Name the column that holds the text as text_column, or conversations as messages_column"
    )
    return BadDocument(f"no column {column}", f"no column {column!r}; it has {has}. {advice}")


def not_json(error: Exception, start: int = 0) -> BadDocument:
    """
    Args:
        start: where the document begins in the text that was parsed.
    """
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(error)
    if isinstance(error, RecursionError):
        return BadDocument("not JSON", "nested too deeply")
    if not isinstance(error, JSONDecodeError):
        return BadDocument("not JSON", f"not JSON: {error}")
    character = error.pos - start + 1
    return BadDocument("not JSON", f"not JSON (cut off?): {error.msg} at character {character}")
