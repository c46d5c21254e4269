"""The documents of one file in sequence: records, which are cheap to find, then decoded texts.

    read_records(file, column)  ->  Record(number, content), ...    a JSON line, array entry, row
                                                                    or text each
    decode(content, column)     ->  its text, or its conversation as one (`chat.py`); or
                                    `BadDocument`, with the kind of its fault

Only one column is read. One process may find the records and others decode them.
"""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from torchtitan.data.text.chat import Chat, MessageTexts
from torchtitan.data.text.files import Format, format_of
from torchtitan.data.text.json_records import is_array, records_of, without_long_strings
from torchtitan.data.text.opening import FileStamp, is_compressed, is_damage, open_plain
from torchtitan.data.text.retry import DataError
from torchtitan.data.text.tables import arrow_rows, csv_rows, parquet_rows
from torchtitan.data.text.texts import (
    LONG,
    BadDocument,
    FileText,
    HeldText,
    LongText,
    Record,
    Text,
    damaged,
    missing_column,
    not_json,
    not_utf8,
)

SKIP_ADVICE = '. on_bad_document = "skip" leaves such documents out'


_NOUNS = {
    "json": "line",
    "array": "entry",
    "csv": "line",
    "tsv": "line",
    "parquet": "row",
    "arrow": "row",
}


def place(file: Path, number: int) -> str:
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
            return "array" if is_array(content.read(4096)) else "json"
    except Exception as error:
        if is_damage(error):
            return kind
        raise


def read_records(
    file: Path,
    column: str,
    advance: Callable[[int], None] | None = None,
    stamp: FileStamp | None = None,
) -> Iterator[Record]:
    """The records of a file, blank lines left out.

    Args:
        advance: called with the number of bytes of every read.
        stamp: of the file that is expected.

    Raises:
        OSError: reading fails.
        DataError: the file's structure is damaged, so that its records can't be told apart; or it
        is not a regular
            file, or has changed since `stamp`.
    """
    kind = kind_of(file, stamp)
    if kind == "text":
        yield Record(1, FileText(str(file), stamp=stamp))
        if advance:
            advance(file.stat().st_size)
        return
    tabular = kind in ("parquet", "arrow")  # read at many places of the file
    if tabular and is_compressed(file):
        raise DataError(
            f"{file}: decompress it; {kind} files are read at many places, and can be "
            "compressed inside"
        )
    number = 0
    try:
        with open_plain(file, None if tabular else advance, stamp) as content:
            try:
                for record in _records(content, kind, column, advance):
                    number = record.number
                    yield record
            except DataError as error:
                raise DataError(f"{file}: {error}") from None
    except Exception as error:
        if not (is_compressed(file) and is_damage(error)):
            raise
        yield Record(number + 1, damaged(error))


def _records(
    file: IO[bytes], kind: Kind, column: str, advance: Callable[[int], None] | None
) -> Iterator[Record]:
    if kind in ("csv", "tsv"):
        return csv_rows(file, column, "," if kind == "csv" else "\t")
    if kind == "parquet":
        return parquet_rows(file, column, advance)
    if kind == "arrow":
        return arrow_rows(file, column, advance)
    return records_of(file, array=kind == "array")


def decode(content: Any, column: str, chat: Chat | MessageTexts | None = None) -> Text:
    """The text of a record's content.

    Args:
        chat: the column holds conversations, which it checks.

    Raises:
        BadDocument: it has none, or one that can't be decoded.
    """
    if isinstance(content, BadDocument):
        raise content
    if chat is not None:
        return _held(_conversation(content, column, chat))
    if isinstance(content, FileText):
        parts = []
        length = 0
        for part in content.parts():
            parts.append(part)
            length += len(part)
            if length > LONG:
                return content
        return "".join(parts)
    if isinstance(content, bytes) and len(content) > LONG:
        line, held = without_long_strings(content, LONG)
        name = _row_text(_json(line, column), column)
        return held.get(name, name) if isinstance(name, str) else name
    text = _row_text(_json(content, column) if isinstance(content, bytes) else content, column)
    return _held(text)


def _held(text: Text) -> Text:
    return HeldText(text) if isinstance(text, str) and len(text) > LONG else text


def _conversation(content: Any, column: str, chat: Chat | MessageTexts) -> Text:
    if isinstance(content, FileText):
        raise BadDocument("not an object", "is plain text, not conversations")
    row = _json(content, column) if isinstance(content, bytes) else content
    messages = row if isinstance(row, list) else _value(row, column)
    return _encodable(chat.document(messages))


def _json(line: bytes, column: str) -> Any:
    """The value of a JSON line, or at least its column."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
            raise not_json(error) from None
        # Nested too deeply, or a number with too many digits. Arrow skips these in other columns.
        import pyarrow
        import pyarrow.json

        options = pyarrow.json.ParseOptions(
            explicit_schema=pyarrow.schema({column: pyarrow.string()}),
            unexpected_field_behavior="ignore",
        )
        blocks = pyarrow.json.ReadOptions(block_size=len(line), use_threads=False)
        try:
            (row,) = pyarrow.json.read_json(io.BytesIO(line), blocks, options).to_pylist()
        except (pyarrow.ArrowException, ValueError):
            raise not_json(error) from None
        return row


def _row_text(row: Any, column: str) -> Text:
    text = row if isinstance(row, str) else _value(row, column)  # or an array of texts
    if isinstance(text, LongText):
        return text
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
        raise missing_column(column, row)
    if row[column] is None:
        raise BadDocument(f"null {column}", f"column {column!r} is null")
    return row[column]


def _encodable(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"at character {error.start + 1}"
            # `json_records` and `csv_rows` escape bytes that aren't UTF-8.
            if 0xDC80 <= ord(text[error.start]) <= 0xDCFF:
                raise BadDocument("not UTF-8", f"not UTF-8 {where}") from None
            raise BadDocument("lone surrogate", f"half a surrogate pair {where}") from None
    return text
