"""The documents of one file in sequence: records, which are cheap to find, then decoded texts.

    read_records(file, column)  ->  FileRecord(number, content), ...    one per JSON line, array
                                                                        entry, row or text
    decode(content, column)     ->  the text, or the conversation as a text (`chat.py`); raises
                                    `BadDocument`, with the kind of its fault

A JSON array is parsed as a whole; `tables.py` reads Parquet, Arrow and CSV. Only one column is
read. One process may find the records and others decode them.
"""

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, cast

from torchtitan.data.read.files import Format, format_of
from torchtitan.data.read.opening import (
    BadDocument,
    DataError,
    FileStamp,
    is_compressed,
    is_damage,
    open_plain,
)
from torchtitan.data.read.tables import arrow_rows, csv_rows, no_column_error, parquet_rows
from torchtitan.utils.files import BOM
from torchtitan.utils.limits import RECORD_BYTES

SKIP_ADVICE = '. on_bad_document = "skip" leaves such documents out'
_NOUNS = {
    "json": "line",
    "array": "entry",
    "csv": "row",
    "tsv": "row",
    "parquet": "row",
    "arrow": "row",
}


class FileRecord(NamedTuple):
    """A document as its file stores it, not decoded."""

    number: int
    """Number of its line, entry or row, counted from 1."""
    content: Any
    """A JSON line (bytes), an array's entry or a row (dict), a file's text (str), or the
    `BadDocument` in its place.
    """
    start: int = -1
    """First byte of a JSON line in the decompressed file."""


class Conversations(Protocol):
    """Makes a document of a list of messages (`chat.Chat`)."""

    fingerprint: str
    """Changes when the documents do."""

    def document(self, value: Any) -> str:
        """
        Raises:
            BadDocument: it is no conversation.
        """


def record_location(file: Path, number: int) -> str:
    """Names a record, for messages."""
    noun = _NOUNS.get(kind_of(file)) if format_of(file) else "document"
    return f"{file}: {noun} {number}" if noun else str(file)


Kind = Literal[Format, "array"]


def kind_of(file: Path, stamp: FileStamp | None = None) -> Kind:
    """The format of a file. JSON is `json` if it is lines and `array` if it is an array."""
    kind = format_of(file)
    assert kind is not None, file
    if kind == "lines":
        return "json"
    if kind != "json":
        return kind
    try:
        with open_plain(file, stamp=stamp) as content:
            beginning = content.read(4096).removeprefix(BOM).lstrip()
            return "array" if beginning.startswith(b"[") else "json"
    except Exception as error:
        if is_damage(error):
            return kind
        raise


def read_records(
    file: Path,
    column: str,
    advance: Callable[[int], None] | None = None,
    stamp: FileStamp | None = None,
) -> Iterator[FileRecord]:
    """The records of a file, except blank lines.

    Args:
        advance: called with the number of bytes of every read.
        stamp: of the file when it was indexed.

    Raises:
        OSError: reading fails.
        DataError: the file's structure is damaged, so that its records can't be separated; or it is
        not a regular file, or has changed since `stamp`.
    """
    kind = kind_of(file, stamp)
    if kind in ("parquet", "arrow") and is_compressed(file):
        raise DataError(
            f"{file}: decompress it; {kind} files are read at many places, and can be "
            "compressed inside"
        )
    report = advance or (lambda size: None)
    number = 0
    try:
        with open_plain(file, None if kind == "parquet" else report, stamp) as plain:
            try:
                for record in _records(plain, kind, column, report=report):
                    number = record.number
                    yield record
            except BadDocument as error:
                yield FileRecord(number + 1, error)
            except DataError as error:
                raise DataError(f"{file}: {error}") from None
    except Exception as error:
        if not (is_compressed(file) and is_damage(error)):
            raise
        problem = f"can't be decompressed from here on (cut off?): {error}"
        yield FileRecord(number + 1, BadDocument("damaged compression", problem))


def _records(
    plain: IO[bytes], kind: Kind, column: str, report: Callable[[int], None]
) -> Iterator[FileRecord]:
    beginning = b"" if kind in ("parquet", "arrow") else cast(BufferedReader, plain).peek(2)[:2]
    if beginning in (BOM_UTF16_LE, BOM_UTF16_BE):
        problem = "UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
        raise BadDocument("not UTF-8", problem) if kind == "text" else DataError(problem)
    if kind == "json":
        yield from _lines(plain)
    elif kind == "array":
        yield from _array(plain)
    elif kind == "text":
        yield from _text(plain)
    elif kind == "parquet":
        yield from _numbered(parquet_rows(plain, column, report))
    elif kind == "arrow":
        yield from _numbered(arrow_rows(plain, column))
    else:
        yield from _numbered(csv_rows(plain, "," if kind == "csv" else "\t", column))


def _numbered(rows: Iterable[Any]) -> Iterator[FileRecord]:
    return (FileRecord(number, row) for number, row in enumerate(rows, 1))


def _text(file: IO[bytes]) -> Iterator[FileRecord]:
    content = file.read().removeprefix(BOM)
    try:
        yield FileRecord(1, content.decode())
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise not_utf8(error, f"line {line}: ") from None


def _lines(file: IO[bytes]) -> Iterator[FileRecord]:
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
            problem = f"longer than {RECORD_BYTES >> 20} MiB; split its text"
            yield FileRecord(number, BadDocument("too long", problem), begin)
        elif not line.isspace():
            yield FileRecord(number, line, begin)


def _array(file: IO[bytes]) -> Iterator[FileRecord]:
    """The entries of a JSON array, which is loaded whole.

    Raises:
        DataError: it is no JSON.
    """
    try:
        entries = json.loads(file.read().removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise DataError(f"the array is {_not_json(error)}") from None
    yield from _numbered(entries)


def decode(content: Any, column: str, chat: Conversations | None = None) -> str:
    """The text of a record's content.

    Args:
        chat: the column holds conversations, which it checks.

    Raises:
        BadDocument: it has none, or one that can't be decoded.
    """
    if isinstance(content, BadDocument):
        raise content
    row = content
    if isinstance(content, bytes):
        try:
            row = json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise _not_json(error) from None
    if chat is not None:
        return _encodable(chat.document(row if isinstance(row, list) else _value(row, column)))
    text = row if isinstance(row, str) else _value(row, column)
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(error) from None
    if not isinstance(text, str):
        raise BadDocument(
            "not a string", f"column {column!r} holds {type(text).__name__}, not text"
        )
    return _encodable(text)


def _value(row: Any, column: str) -> Any:
    """
    Raises:
        BadDocument: there is none.
    """
    if not isinstance(row, dict):
        raise BadDocument(
            "not an object", f'must be an object with a "{column}", got {type(row).__name__}'
        )
    if column not in row:
        raise no_column_error(column, row)
    if row[column] is None:
        raise BadDocument(f"null {column}", f"column {column!r} is null")
    return row[column]


def _encodable(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"half a surrogate pair at character {error.start + 1}"
            raise BadDocument("lone surrogate", problem) from None
    return text


def not_utf8(error: UnicodeDecodeError, where: str = "") -> BadDocument:
    """
    Args:
        where: the start of the message.
    """
    byte = f"0x{error.object[error.start]:02x}, {error.reason}"
    return BadDocument("not UTF-8", f"{where}not UTF-8: {byte} at byte {error.start + 1}")


def _not_json(error: Exception) -> BadDocument:
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(error)
    if isinstance(error, RecursionError):
        return BadDocument("not JSON", "nested too deeply")
    if not isinstance(error, json.JSONDecodeError):
        return BadDocument("not JSON", f"not JSON: {error}")
    problem = f"not JSON (cut off?): {error.msg} at character {error.pos + 1}"
    return BadDocument("not JSON", problem)
