"""The documents of one file, in sequence: first as they lie there, cheap to find, then decoded.

    read_records(file, column)  ->  Record(number, content), ...      one JSON line, array entry, Parquet row or text
    decode(content, column)     ->  its text; or `BadDocument`, with the kind of its fault

Only the column asked for is read. One process may find the records and others decode them.
"""

import codecs
import io
import json
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from torchtitan.data.files import Stamp, format_of, is_compressed, is_damage, open_data, open_plain
from torchtitan.data.retry import DataError

_BLOCK = 2**20
_LONGEST = 1000 * 2**20
"""Bytes of the longest JSON line. It is parsed in memory."""
LONG = 4 * 2**20
"""Longer texts, in bytes or characters, are handed on in parts."""
SKIP_ADVICE = '. on_bad_document = "skip" leaves such documents out'
_BOM = b"\xef\xbb\xbf"


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
    """A long text in memory. What is made of it, such as its tokens, would take many times its size."""

    def __init__(self, text: str):
        self.text = text

    def parts(self, start: int = 0) -> Iterator[str]:
        for begin in range(start, len(self.text), _BLOCK):
            yield self.text[begin : begin + _BLOCK]

    def size(self, part: str) -> int:
        return len(part)


class FileText(LongText):
    """Bytes `start` to `end` (None: all) of a file's decompressed contents, as UTF-8."""

    def __init__(self, path: str, start: int = 0, end: int | None = None, stamp: Stamp | None = None):
        """
        Args:
            stamp: what the file was when its documents were found.
        """
        self.path, self.start, self.end = path, start, end
        self.stamp = stamp
        self.attempt: Callable[[Callable[[], Any]], Any] = operator.call
        """Opens the file or reads from it, again if that fails."""

    def parts(self, start: int = 0) -> Iterator[str]:
        """
        Raises:
            BadDocument: it isn't UTF-8.
            DataError: the file has changed.
        """
        decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
        with self.attempt(lambda: open_plain(Path(self.path), stamp=self.stamp)) as file:
            place = file.seek(self.start + start) if self.start + start else 0
            while True:
                wanted = _BLOCK if self.end is None else min(_BLOCK, self.end - place)
                try:
                    block = self.attempt(partial(_read_at, file, place, wanted))
                    if self.stamp is not None and not is_compressed(Path(self.path)):
                        self.stamp.check(file.fileno())
                    first, place = not place, place + len(block)
                    text = decoder.decode(block.removeprefix(_BOM) if first else block, final=not block)
                except UnicodeDecodeError as error:
                    at = place - len(error.object) + error.start
                    line += error.object[: error.start].count(b"\n")
                    raise BadDocument("not UTF-8", f"line {line}: not UTF-8: {_byte(error)} at byte {at + 1}") from None
                except Exception as error:
                    if is_damage(error):
                        raise _damaged(error) from None
                    raise
                if text:
                    line += text.count("\n")
                    yield text
                if not block:
                    return

    def size(self, part: str) -> int:
        return len(part.encode())


def _read_at(file: IO[bytes], place: int, size: int) -> bytes:
    if file.tell() != place:  # after an attempt that failed
        file.seek(place)
    return file.read(size)


class Record(NamedTuple):
    """A document as it lies in its file."""

    number: int
    """Of its line, entry or row, counted from 1."""
    content: Any
    """A JSON line (bytes), an array's entry or a row (dict), a text file (`FileText`), or what is wrong."""
    start: int = -1
    """First byte of a JSON line in the decompressed file."""


def place(file: Path, number: int) -> str:
    """Names a record, for messages."""
    noun = {"json": "line", "parquet": "row", "array": "entry"}.get(kind_of(file))
    return f"{file}: {noun} {number}" if noun else str(file)


def kind_of(file: Path, stamp: Stamp | None = None) -> str:
    """`json` (lines), `array` (a JSON array), `text` or `parquet`."""
    kind = format_of(file)
    assert kind is not None, file
    if kind != "json" or ".jsonl" in file.suffixes:
        return kind
    try:
        with open_plain(file, stamp=stamp) as content:
            return "array" if is_array(content.read(4096)) else "json"
    except Exception as error:
        if is_damage(error):
            return kind
        raise


def read_records(
    file: Path, column: str, advance: Callable[[int], None] | None = None, stamp: Stamp | None = None
) -> Iterator[Record]:
    """The records of a file, blank lines left out.

    Args:
        advance: called with numbers of bytes that were read of the file.
        stamp: what the file is expected to be.

    Raises:
        OSError: reading fails.
        DataError: the file is no Parquet file, not a regular file, or has changed since `stamp`.
    """
    kind = kind_of(file, stamp)
    if kind == "text":
        yield Record(1, FileText(str(file), stamp=stamp))
        if advance:
            advance(file.stat().st_size)
        return
    number = 0
    try:
        if kind == "parquet":
            with open_data(file, stamp) as content:
                yield from _parquet_rows(file, content, column, advance)
            return
        with open_plain(file, advance, stamp) as content:
            for record in records_of(content, array=kind == "array"):
                number = record.number
                yield record
    except Exception as error:
        if not (is_compressed(file) and is_damage(error)):
            raise
        yield Record(number + 1, _damaged(error))


def records_of(file: IO[bytes], array: bool | None = None) -> Iterator[Record]:
    """The records of an open JSON file: of lines, or of an `array` (None: as the first character says)."""
    if array is None:
        file = buffered = io.BufferedReader(cast(io.RawIOBase, file), _BLOCK)
        array = is_array(buffered.peek(4096))
    return _entries(file) if array else _lines(file)


def is_array(beginning: bytes) -> bool:
    """Whether JSON that begins like this is an array instead of lines."""
    return beginning.removeprefix(_BOM).lstrip().startswith(b"[")


def _lines(file: IO[bytes]) -> Iterator[Record]:
    start = number = 0
    while line := file.readline(_LONGEST + 1):
        number, begin = number + 1, start
        start += len(line)
        if number == 1 and line.startswith(_BOM):
            line, begin = line[len(_BOM) :], len(_BOM)
        if len(line) > _LONGEST:
            while not line.endswith(b"\n") and (line := file.readline(_LONGEST)):
                start += len(line)
            yield Record(number, BadDocument("too long", f"longer than {_LONGEST >> 20} MiB; split its text"), begin)
        elif not line.isspace():
            yield Record(number, line, begin)


def _entries(file: IO[bytes]) -> Iterator[Record]:
    """The entries of a JSON array, of which only one and a block are held. What follows a bad one can't be read."""
    # Bytes that aren't UTF-8 become lone surrogates, so that only their entry is bad.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape")
    decoder, number = json.JSONDecoder(), 0
    buffer, block = text.read(_BLOCK).lstrip()[1:], _BLOCK
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            return
        try:
            entry, end = decoder.raw_decode(buffer)
            if end == len(buffer):  # a number may go on
                raise json.JSONDecodeError("cut off", buffer, end)
        except (ValueError, RecursionError) as error:
            if isinstance(error, RecursionError) or not (more := text.read(block)):
                yield Record(number + 1, _not_json(error))
                return
            buffer, block = buffer + more, min(2 * block, 2**28)
            continue
        number, buffer, block = number + 1, buffer[end:], _BLOCK
        yield Record(number, entry)


def _parquet_rows(
    file: Path, content: IO[bytes], column: str, advance: Callable[[int], None] | None
) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(content)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DataError(f"{file}: not a Parquet file (damaged or cut off?): {str(error).splitlines()[0]}") from None
    with table:
        if column not in table.schema_arrow.names:
            bad = _missing(column, table.schema_arrow.names)
            yield from (Record(i + 1, bad) for i in range(table.metadata.num_rows))
            return
        number, share = 0, os.fstat(content.fileno()).st_size / max(1, table.metadata.num_rows)
        for batch in table.iter_batches(256, columns=[column], use_threads=False):
            values = batch.column(0)
            if pyarrow.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            if str(values.type) in ("string", "large_string"):
                values = values.cast(pyarrow.large_binary())  # Arrow doesn't check UTF-8; `decode` does
            for value in values.to_pylist():
                number += 1
                yield Record(number, {column: value})
            if advance:
                advance(int(share * len(values)))


def decode(content: Any, column: str) -> Text:
    """The text of a record's content.

    Raises:
        BadDocument: it has none, or one that can't be decoded.
    """
    if isinstance(content, BadDocument):
        raise content
    if isinstance(content, FileText):
        parts, texts, length = content.parts(), [], 0
        for part in parts:
            texts.append(part)
            if (length := length + len(part)) > LONG:
                return content
        return "".join(texts)
    text = _row_text(_json(content, column) if isinstance(content, bytes) else content, column)
    return HeldText(text) if len(text) > LONG else text


def _json(line: bytes, column: str) -> Any:
    """The value of a JSON line, or at least its column."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
            raise _not_json(error) from None
        # Too deep, or a number of too many digits. Arrow skips these beside the column, without recursion.
        import pyarrow
        import pyarrow.json

        options = pyarrow.json.ParseOptions(
            explicit_schema=pyarrow.schema({column: pyarrow.string()}), unexpected_field_behavior="ignore"
        )
        blocks = pyarrow.json.ReadOptions(block_size=len(line), use_threads=False)
        try:
            (row,) = pyarrow.json.read_json(io.BytesIO(line), blocks, options).to_pylist()
        except (pyarrow.ArrowException, ValueError):
            raise _not_json(error) from None
        return row


def _row_text(row: Any, column: str) -> str:
    if isinstance(row, str):  # an array of texts
        text: Any = row
    elif not isinstance(row, dict):
        raise BadDocument("not an object", f'must be an object with a "{column}", got {type(row).__name__}')
    elif column not in row:
        raise _missing(column, row)
    else:
        text = row[column]
    if text is None:
        raise BadDocument(f"null {column}", f"column {column!r} is null")
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise _not_json(error) from None
    if not isinstance(text, str):
        raise BadDocument("not a string", f"column {column!r} holds {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            escaped = 0xDC80 <= ord(text[error.start]) <= 0xDCFF  # by `_entries`
            kind, problem = ("not UTF-8", "not UTF-8") if escaped else ("lone surrogate", "half a surrogate pair")
            raise BadDocument(kind, f"{problem} at character {error.start + 1}") from None
    return text


def _missing(column: str, names: Any) -> BadDocument:
    has = ", ".join(map(str, names)) or "none"
    advice = "Name the column that holds the text as text_column"
    return BadDocument(f"no column {column}", f"no column {column!r}; it has {has}. {advice}")


def _not_json(error: Exception) -> BadDocument:
    if isinstance(error, UnicodeDecodeError):
        return BadDocument("not UTF-8", f"not UTF-8: {_byte(error)} at byte {error.start + 1}")
    if isinstance(error, json.JSONDecodeError):
        return BadDocument("not JSON", f"not JSON (cut off?): {error.msg} at character {error.pos + 1}")
    return BadDocument("not JSON", "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}")


def _byte(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}, {error.reason}"


def _damaged(error: BaseException) -> BadDocument:
    return BadDocument("damaged compression", f"can't be decompressed from here on (cut off?): {error}")
