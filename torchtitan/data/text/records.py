"""The documents of one file, in sequence: first as they lie there, cheap to find, then decoded.

    read_records(file, column)  ->  Record(number, content), ...      one JSON line, array entry,
    row or text
    decode(content, column)     ->  its text; or `BadDocument`, with the kind of its fault

Only the column asked for is read. One process may find the records and others decode them.
"""

import codecs
import io
import json
import operator
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from torchtitan.data.text.files import (
    Format,
    Stamp,
    format_of,
    is_compressed,
    is_damage,
    open_plain,
)
from torchtitan.data.text.json_records import is_array, records_of
from torchtitan.data.text.json_strings import without_long_strings
from torchtitan.data.text.retry import DataError
from torchtitan.data.text.tables import arrow_rows, csv_rows, parquet_rows
from torchtitan.data.text.texts import (
    BLOCK,
    LONG,
    BadDocument,
    HeldText,
    LongText,
    Record,
    Text,
    describe_byte,
    missing_column,
    not_json,
)

SKIP_ADVICE = '. on_bad_document = "skip" leaves such documents out'
_BOM = b"\xef\xbb\xbf"


class FileText(LongText):
    """Bytes `start` to `end` (None: all) of a file's decompressed contents, as UTF-8."""

    def __init__(
        self,
        path: str,
        start: int = 0,
        end: int | None = None,
        stamp: Stamp | None = None,
    ):
        """
        Args:
            stamp: what the file was when its documents were found.
        """
        self.path = path
        self.start = start
        self.end = end
        self.stamp = stamp
        self.attempt: Callable[[Callable[[], Any]], Any] = operator.call
        """Opens the file or reads from it, again if that fails."""

    def parts(self, start: int = 0) -> Iterator[str]:
        """
        Raises:
            BadDocument: it isn't UTF-8.
            DataError: the file has changed.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        line = 1
        with self.attempt(lambda: open_plain(Path(self.path), stamp=self.stamp)) as file:
            place = file.seek(self.start + start) if self.start + start else 0
            while True:
                wanted = BLOCK if self.end is None else min(BLOCK, self.end - place)
                try:
                    block = self.attempt(partial(_read_at, file, place, wanted))
                    if self.stamp is not None and not is_compressed(Path(self.path)):
                        self.stamp.check(file.fileno())
                    first = not place
                    place = place + len(block)
                    text = decoder.decode(
                        block.removeprefix(_BOM) if first else block, final=not block
                    )
                except UnicodeDecodeError as error:
                    at = place - len(error.object) + error.start
                    line += error.object[: error.start].count(b"\n")
                    problem = f"line {line}: not UTF-8: {describe_byte(error)} at byte {at + 1}"
                    raise BadDocument("not UTF-8", problem) from None
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
    noun = _NOUNS.get(kind_of(file))
    return f"{file}: {noun} {number}" if noun else str(file)


Kind = Literal[Format, "array"]
_TABULAR = ("parquet", "arrow")
"""Formats that are read at many places of a file."""


def kind_of(file: Path, stamp: Stamp | None = None) -> Kind:
    """The format of a file; of JSON `json` for lines and `array` for an array."""
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
    stamp: Stamp | None = None,
) -> Iterator[Record]:
    """The records of a file, blank lines left out.

    Args:
        advance: called with numbers of bytes that were read of the file.
        stamp: what the file is expected to be.

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
    tabular = kind in _TABULAR
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
        yield Record(number + 1, _damaged(error))


def _records(
    file: IO[bytes],
    kind: Kind,
    column: str,
    advance: Callable[[int], None] | None,
) -> Iterator[Record]:
    if kind in ("csv", "tsv"):
        return csv_rows(file, column, "," if kind == "csv" else "\t")
    if kind in _TABULAR:
        return (parquet_rows if kind == "parquet" else arrow_rows)(file, column, advance)
    return records_of(file, array=kind == "array")


def decode(content: Any, column: str) -> Text:
    """The text of a record's content.

    Raises:
        BadDocument: it has none, or one that can't be decoded.
    """
    if isinstance(content, BadDocument):
        raise content
    if isinstance(content, FileText):
        parts = content.parts()
        texts = []
        length = 0
        for part in parts:
            texts.append(part)
            if (length := length + len(part)) > LONG:
                return content
        return "".join(texts)
    if isinstance(content, bytes):
        line, held = without_long_strings(content, LONG) if len(content) > LONG else (content, {})
        text = _row_text(_json(line, column), column)
        return held.get(text, text) if isinstance(text, str) else text
    text = _row_text(content, column)
    return HeldText(text) if isinstance(text, str) and len(text) > LONG else text


def _json(line: bytes, column: str) -> Any:
    """The value of a JSON line, or at least its column."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
            raise not_json(error) from None
        # Too deep, or a number of too many digits. Arrow skips these beside the column, without
        # recursion.
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
    if isinstance(row, str):  # an array of texts
        text: Any = row
    elif not isinstance(row, dict):
        raise BadDocument(
            "not an object", f'must be an object with a "{column}", got {type(row).__name__}'
        )
    elif column not in row:
        raise missing_column(column, row)
    else:
        text = row[column]
    if isinstance(text, LongText):
        return text
    if text is None:
        raise BadDocument(f"null {column}", f"column {column!r} is null")
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise not_json(error) from None
    if not isinstance(text, str):
        raise BadDocument(
            "not a string", f"column {column!r} holds {type(text).__name__}, not text"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            escaped = 0xDC80 <= ord(text[error.start]) <= 0xDCFF  # by `json_records` and `csv_rows`
            kind, problem = (
                ("not UTF-8", "not UTF-8")
                if escaped
                else ("lone surrogate", "half a surrogate pair")
            )
            raise BadDocument(kind, f"{problem} at character {error.start + 1}") from None
    return text


def _damaged(error: BaseException) -> BadDocument:
    return BadDocument(
        "damaged compression", f"can't be decompressed from here on (cut off?): {error}"
    )
