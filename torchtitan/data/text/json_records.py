"""The documents of a JSON file: its lines, or the entries of the one array that it holds."""

import codecs
import io
import json
import re
import secrets
from collections.abc import Iterator
from typing import IO, Any, cast

from torchtitan.data.text.retry import DataError
from torchtitan.data.text.texts import BLOCK, BOM, BadDocument, LongText, Record, not_json, not_utf8
from torchtitan.utils.limits import RECORD_BYTES

_BLANKS = " \t\r\n"
_UNFINISHED = 16
"""Characters at the end of a block where an error may only mean that the entry goes on."""
_BACKSLASH = ord("\\")
_ESCAPE = 6
"""Bytes of the longest escape, `\\u00e9`."""
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
"""The first escape of a pair that makes one character."""


def records_of(file: IO[bytes], array: bool | None = None) -> Iterator[Record]:
    """The records of an open JSON file.

    Args:
        array: whether it holds an array instead of lines; None: the first character decides.

    Raises:
        DataError: the entries of an array aren't separated by commas, or something follows it.
    """
    if array is None:
        file = buffered = io.BufferedReader(cast(io.RawIOBase, file), BLOCK)
        array = is_array(buffered.peek(4096))
    return _Array(file).entries() if array else _lines(file)


def is_array(beginning: bytes) -> bool:
    """Whether JSON that begins like this is an array instead of lines."""
    return beginning.removeprefix(BOM).lstrip(_BLANKS.encode()).startswith(b"[")


def _lines(file: IO[bytes]) -> Iterator[Record]:
    start = number = 0
    while line := file.readline(RECORD_BYTES + 1):
        number += 1
        begin = start
        start += len(line)
        if number == 1 and line.startswith(BOM):
            line = line[len(BOM) :]
            begin = len(BOM)
        if len(line) > RECORD_BYTES:
            while not line.endswith(b"\n") and (line := file.readline(RECORD_BYTES)):
                start += len(line)
            yield Record(number, _too_long(), begin)
        elif not line.isspace():
            yield Record(number, line, begin)


def _too_long() -> BadDocument:
    return BadDocument("too long", f"longer than {RECORD_BYTES >> 20} MiB; split its text")


class _Array:
    """Reads the entries of a JSON array, holding one entry and a block at a time.

    An entry that can't be parsed is a bad document, and ends the reading. Faults between the
    entries or after the array are errors about the file.
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
                problem = "not JSON (cut off?): the array doesn't end"
                yield Record(number + 1, BadDocument("not JSON", problem))
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
        """Go to the next character that isn't blank, and return it; "" at the end of the file."""
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
        """The next entry, or a `BadDocument`."""
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
            if len(self.buffer) > RECORD_BYTES:
                return _too_long()
            block = min(2 * block, 2**28)

    def _may_go_on(self, error: Exception) -> bool:
        """Whether parsing failed only because the entry hasn't been read to its end."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        near_end = error.pos > len(self.buffer) - _UNFINISHED
        return near_end or error.msg.startswith("Unterminated string")

    def _damage(self, problem: str) -> DataError:
        used = self.buffer[: self.at]
        line = self.line + used.count("\n")
        found = self.buffer[self.at : self.at + 20]
        return DataError(
            f"line {line}, byte {self.bytes + _size(used) + 1}: {problem}, got {found!r}"
        )


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


class JsonString(LongText):
    """A long string in a line of JSON, decoded block by block. Positions in it are characters.

    Python's parser would hold the line, its characters and the string at once: up to nine times the
    line's size, because one emoji makes every character of a Python string take four bytes.
    """

    def __init__(self, line: bytes, begin: int, end: int):
        """
        Args:
            line: isn't copied.
            begin: first byte after the opening quote.
            end: place of the closing quote.
        """
        self.line = line
        self.begin = begin
        self.end = end

    def parts(self, start: int = 0) -> Iterator[str]:
        """
        Raises:
            BadDocument: it isn't UTF-8, or has a wrong escape.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        place = self.begin
        while place < self.end:
            end = _whole_escapes(self.line, place, min(place + BLOCK, self.end), self.end)
            try:
                raw = decoder.decode(self.line[place:end], final=end == self.end)
            except UnicodeDecodeError as error:
                raise not_utf8(error, end - len(error.object)) from None
            text = _unescaped(raw, place)
            place = end
            if start < len(text):
                yield text[start:]
            start = max(start - len(text), 0)

    def size(self, part: str) -> int:
        return len(part)


def _unescaped(raw: str, place: int) -> str:
    try:
        text: str = json.loads(f'"{raw}"')
        text.encode()
    except json.JSONDecodeError as error:
        raise BadDocument(
            "not JSON", f"not JSON: {error.msg} in the string, after byte {place}"
        ) from None
    except UnicodeEncodeError:
        raise BadDocument(
            "lone surrogate", f"half a surrogate pair in the string, after byte {place}"
        ) from None
    return text


def _whole_escapes(line: bytes, place: int, end: int, last: int) -> int:
    """Where to end the block from `place` on, at or before `end`, so that no escape or pair of them
    is cut.
    """
    if end == last:
        return end
    at = line.rfind(b"\\", max(place, end - _ESCAPE), end)
    if at >= 0 and not _is_escaped(line, place, at):
        length = _ESCAPE if line[at + 1 : at + 2] == b"u" else 2
        if at + length > end:
            end = at
    first = end - _ESCAPE
    if (
        first >= place
        and _FIRST_HALF.fullmatch(line, first, end)
        and not _is_escaped(line, place, first)
    ):
        end = first
    return end


def _is_escaped(line: bytes, begin: int, at: int) -> bool:
    """Whether an odd number of backslashes precedes a byte, from `begin` on."""
    first = at
    while first > begin and line[first - 1] == _BACKSLASH:
        first -= 1
    return (at - first) % 2 == 1


def without_long_strings(line: bytes, longest: int) -> tuple[bytes, dict[str, JsonString]]:
    """A line in which names stand for the strings of more than `longest` bytes, and these strings
    by name.
    """
    held: dict[str, JsonString] = {}
    kept = []
    place = 0
    for begin, end in _strings(line):
        if end - begin > longest:
            name = secrets.token_hex(16)
            held[name] = JsonString(line, begin, end)
            kept += [line[place:begin], name.encode()]
            place = end
    return b"".join([*kept, line[place:]]), held


def _strings(line: bytes) -> Iterator[tuple[int, int]]:
    """Where each string of a line begins and ends, without its quotes."""
    place = 0
    while (opening := line.find(b'"', place)) >= 0:
        begin = opening + 1
        end = line.find(b'"', begin)
        while end >= 0 and _is_escaped(line, begin, end):
            end = line.find(b'"', end + 1)
        if end < 0:  # cut off, as the parser will find
            return
        yield begin, end
        place = end + 1
