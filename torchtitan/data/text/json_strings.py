"""Long strings of a JSON line, decoded block by block.

Python's parser would hold such a line, its characters and the string at once: up to nine times the
line's size, because one emoji makes every character of a Python string take four bytes.
"""

import codecs
import json
import re
import secrets
from collections.abc import Iterator

from torchtitan.data.text import texts
from torchtitan.data.text.texts import BadDocument, LongText, describe_byte

_BACKSLASH = ord("\\")
_ESCAPE = 6
"""Bytes of the longest escape, `\\u00e9`."""
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
"""The first escape of a pair that makes one character."""


class JsonString(LongText):
    """A string in a line of JSON. Positions in it are characters."""

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
            end = _whole_escapes(self.line, place, min(place + texts.BLOCK, self.end), self.end)
            try:
                raw = decoder.decode(self.line[place:end], final=end == self.end)
            except UnicodeDecodeError as error:
                at = end - len(error.object) + error.start
                raise BadDocument(
                    "not UTF-8", f"not UTF-8: {describe_byte(error)} at byte {at + 1}"
                ) from None
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


def _whole_escapes(
    line: bytes,
    place: int,
    end: int,
    last: int,
) -> int:
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
