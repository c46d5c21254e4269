"""The documents of a JSON file: its lines, or the entries of the one array that it holds."""

import io
import json
from collections.abc import Iterator
from typing import IO, Any, cast

from torchtitan.data.text.retry import DataError
from torchtitan.data.text.texts import BLOCK, LONGEST, BadDocument, Record, not_json

_BOM = b"\xef\xbb\xbf"
_BLANKS = " \t\r\n"
_UNFINISHED = 16
"""Characters before the end of what has been read where an error may only mean that more follows.
"""


def records_of(file: IO[bytes], array: bool | None = None) -> Iterator[Record]:
    """The records of an open JSON file: of lines, or of an `array` (None: as the first character
    says).

    Raises:
        DataError: something else than a comma separates an array's entries, or something follows
        the array.
    """
    if array is None:
        file = buffered = io.BufferedReader(cast(io.RawIOBase, file), BLOCK)
        array = is_array(buffered.peek(4096))
    return _Array(file).entries() if array else _lines(file)


def is_array(beginning: bytes) -> bool:
    """Whether JSON that begins like this is an array instead of lines."""
    return beginning.removeprefix(_BOM).lstrip(_BLANKS.encode()).startswith(b"[")


def _lines(file: IO[bytes]) -> Iterator[Record]:
    start = number = 0
    while line := file.readline(LONGEST + 1):
        number = number + 1
        begin = start
        start += len(line)
        if number == 1 and line.startswith(_BOM):
            line = line[len(_BOM) :]
            begin = len(_BOM)
        if len(line) > LONGEST:
            while not line.endswith(b"\n") and (line := file.readline(LONGEST)):
                start += len(line)
            yield Record(number, _too_long(), begin)
        elif not line.isspace():
            yield Record(number, line, begin)


def _too_long() -> BadDocument:
    return BadDocument("too long", f"longer than {LONGEST >> 20} MiB; split its text")


class _Array:
    """Reads the entries of a JSON array, of which only one and a block are held.

    An entry that can't be parsed is a bad document, and what follows it can't be read. What stands
    between the entries and after the array is the file's structure: a fault there is an error about
    the file.
    """

    def __init__(self, file: IO[bytes]):
        # Bytes that aren't UTF-8 become lone surrogates, so that only their entry is bad.
        self.text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
        self.buffer = ""
        self.at = 0
        """Characters of the buffer that have been used."""
        self.bytes = 0
        """Bytes of the file before the buffer."""
        self.line = 1
        """Line of the buffer's first character."""

    def entries(self) -> Iterator[Record]:
        number = 0
        if self._next() == "\ufeff":
            self.at += 1
        self._next()
        self.at += 1  # the bracket
        after = "[" if self._next() != "]" else ""
        while after:
            if self._next() in (",", "]"):
                raise self._damage(f'after "{after}" must be an entry')
            entry = self._entry()
            number += 1
            yield Record(number, entry)
            if isinstance(entry, BadDocument):
                return
            after = self._next()
            if not after:
                yield Record(
                    number + 1,
                    BadDocument("not JSON", "not JSON (cut off?): the array doesn't end"),
                )
                return
            if after == "]":
                break
            if after != ",":
                raise self._damage(f'after entry {number} must be "," or "]"')
            self.at += 1
        self.at += 1
        if self._next():
            raise self._damage("nothing may follow the array (write one array, or JSON lines)")

    def _next(self) -> str:
        """The next character that isn't blank, which it goes to; "" at the end of the file."""
        while True:
            end = len(self.buffer)
            while self.at < end and self.buffer[self.at] in _BLANKS:
                self.at += 1
            if self.at < end:
                return self.buffer[self.at]
            if not self._read(BLOCK):
                return ""

    def _read(self, size: int) -> bool:
        """Read more; False at the end of the file."""
        more = self.text.read(size)
        if more:
            used = self.buffer[: self.at]
            self.bytes += _size(used)
            self.line += used.count("\n")
            self.buffer = self.buffer[self.at :] + more
            self.at = 0
        return bool(more)

    def _entry(self) -> Any:
        """The next entry, or what is wrong with it."""
        decoder = json.JSONDecoder()
        block = BLOCK
        while True:
            try:
                entry, end = decoder.raw_decode(self.buffer, self.at)
                if end < len(self.buffer) or not self._read(block):  # a number may go on
                    self.at = end
                    return entry
            except (ValueError, RecursionError) as error:
                if not self._may_go_on(error) or not self._read(block):
                    return not_json(error, self.at)
            if len(self.buffer) > LONGEST:
                return _too_long()
            block = min(2 * block, 2**28)

    def _may_go_on(self, error: Exception) -> bool:
        """Whether parsing failed only because the entry hasn't been read to its end."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return (
            error.msg.startswith("Unterminated string")
            or error.pos > len(self.buffer) - _UNFINISHED
        )

    def _damage(self, problem: str) -> DataError:
        used = self.buffer[: self.at]
        line = self.line + used.count("\n")
        found = self.buffer[self.at : self.at + 20]
        return DataError(
            f"line {line}, byte {self.bytes + _size(used) + 1}: {problem}, got {found!r}"
        )


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))
