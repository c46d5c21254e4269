"""A document as its file holds it (`Record`), and texts too long to be handled in one piece."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchtitan.data.text.retry import DataError

BLOCK = 2**20
"""Bytes or characters that are read or handed on at once."""
LONG = 4 * 2**20
"""Longer texts, in bytes or characters, are handed on in parts."""
LONGEST = 1000 * 2**20
"""Bytes of the longest JSON line, array entry or CSV field. It is held in memory."""


class BadDocument(DataError):
    """A document that can't be decoded, or has no text."""

    def __init__(self, kind: str, problem: str):
        super().__init__(problem)
        self.kind = kind
        """What `run.json` counts it as."""

    def __reduce__(self) -> tuple[type["BadDocument"], tuple[str, str]]:
        return BadDocument, (self.kind, str(self))


class LongText(ABC):
    """A text that is read in parts, as often as needed. Positions in it are bytes or characters."""

    @abstractmethod
    def parts(self, start: int = 0) -> Iterator[str]:
        """The text from position `start` on."""

    @abstractmethod
    def size(self, part: str) -> int:
        """How far `part` advances the position."""

    def __str__(self) -> str:
        return "".join(self.parts())


Text = str | LongText


class HeldText(LongText):
    """A long text in memory. What is made of it, such as its tokens, would take many times its
    size.
    """

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
            content: an object with the buffer protocol, such as `bytes` or a `pyarrow.Buffer`. It
            isn't copied.
        """
        self.content = content

    def __len__(self) -> int:
        return memoryview(self.content).nbytes

    def parts(self, start: int = 0) -> Iterator[str]:
        """
        Raises:
            BadDocument: it isn't UTF-8.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        content = memoryview(self.content)
        for begin in range(start, len(content), BLOCK):
            end = min(begin + BLOCK, len(content))
            try:
                text = decoder.decode(content[begin:end], final=end == len(content))
            except UnicodeDecodeError as error:
                at = end - len(error.object) + error.start
                raise BadDocument(
                    "not UTF-8", f"not UTF-8: {describe_byte(error)} at byte {at + 1}"
                ) from None
            if text:
                yield text

    def size(self, part: str) -> int:
        return len(part.encode())


class Record(NamedTuple):
    """A document as it lies in its file."""

    number: int
    """Number of its line, entry or row, counted from 1."""
    content: Any
    """A JSON line (bytes), an array's entry or a row (dict), a text file (`FileText`), or what is
    wrong.
    """
    start: int = -1
    """First byte of a JSON line in the decompressed file."""


def describe_byte(error: UnicodeDecodeError) -> str:
    """`0xff, invalid start byte`."""
    return f"0x{error.object[error.start]:02x}, {error.reason}"


def missing_column(column: str, names: Any) -> BadDocument:
    """The error about a document without the column of the text."""
    has = ", ".join(map(str, names)) or "none"
    advice = "Name the column that holds the text as text_column"
    return BadDocument(f"no column {column}", f"no column {column!r}; it has {has}. {advice}")


def not_json(error: Exception, start: int = 0) -> BadDocument:
    """
    Args:
        start: where the document begins in the text that was parsed.
    """
    if isinstance(error, UnicodeDecodeError):
        return BadDocument(
            "not UTF-8", f"not UTF-8: {describe_byte(error)} at byte {error.start + 1}"
        )
    if isinstance(error, RecursionError):
        return BadDocument("not JSON", "nested too deeply")
    message = getattr(error, "msg", None)
    if message is None:
        return BadDocument("not JSON", f"not JSON: {error}")
    character = error.pos - start + 1  # type: ignore[attr-defined]
    return BadDocument("not JSON", f"not JSON (cut off?): {message} at character {character}")
