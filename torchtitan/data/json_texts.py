"""JSON files, read by `datasets` through this module for the column `text` alone.

Its own reader infers a type for everything in a line, which recurses in C++: brackets nested 100,000 deep overflow the
stack and kill the process. Arrow's parser doesn't recurse when it is told which column to read.
"""

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow
import pyarrow.json
from datasets.builder import Key
from datasets.packaged_modules.json.json import Json

from torchtitan.data.retry import DataError

_SCHEMA = pyarrow.schema({"text": pyarrow.string()})
_COLUMN = pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore")
_BATCH = 10 * 2**20
_LONGEST = 100 * _BATCH
"""Bytes of the longest line. Arrow's strings end at 2 GiB."""
_BOM = b"\xef\xbb\xbf"


class JsonTexts(Json):
    """The builder that `datasets` uses for JSON, in files or from the hub."""

    def _generate_tables(self, files_iterables: Iterable[Any], **_: Any) -> Iterator[tuple[Key, pyarrow.Table]]:
        for shard, files in enumerate(files_iterables):
            # `open`, in this module, is replaced by `datasets`: it decompresses, and reads URLs.
            for name in files:
                with open(name, "rb") as file:
                    for i, table in enumerate(_tables(file, str(name))):
                        yield Key(shard, i), self._cast_table(table)


def _tables(file: Any, name: str) -> Iterator[pyarrow.Table]:
    """The texts of a file of JSON lines, or of one array."""
    batches = _batches(file, name)
    first = next(batches, b"").removeprefix(_BOM)
    if first.lstrip().startswith(b"["):
        yield _array(b"".join([first, *batches]), name)
        return
    line = 1
    for batch in itertools.chain([first] if first else [], batches):
        yield _lines(batch, name, line)
        line += batch.count(b"\n")


def _batches(file: Any, name: str) -> Iterator[bytes]:
    """Whole lines, about `_BATCH` bytes at a time."""
    parts, following = [file.read(_BATCH)], file.read(_BATCH)
    while following:
        head, newline, tail = parts[-1].rpartition(b"\n")
        if newline:
            yield b"".join([*parts[:-1], head, newline])
            parts = [tail]
        if sum(map(len, parts)) > _LONGEST:
            raise DataError(f"{name} has a line of more than {_LONGEST >> 20} MiB; split its text")
        parts.append(following)
        following = file.read(_BATCH)
    if last := b"".join(parts):
        yield last


def _lines(batch: bytes, name: str, line: int) -> pyarrow.Table:
    """The texts of JSON lines, of which the first is number `line`."""
    problem = ""
    try:
        options = pyarrow.json.ReadOptions(block_size=len(batch), use_threads=False)
        table = pyarrow.json.read_json(io.BytesIO(batch), read_options=options, parse_options=_COLUMN)
        table.validate(full=True)  # UTF-8
    except pyarrow.ArrowException as error:
        problem = str(error)
    if problem:
        raise DataError(f"{name}: {_explain(batch, line) or problem}")
    if len(table) and table["text"].null_count == len(table) and b'"text"' not in batch:
        first = next(filter(bytes.strip, batch.split(b"\n")))
        raise DataError(f"{name}: {_explain(batch, line) or _no_text(_parse(first))}")
    return table


def _explain(batch: bytes, line: int) -> str | None:
    """What is wrong with the first bad line."""
    for number, text in enumerate(batch.split(b"\n"), line):
        try:
            problem = _row_problem(_parse(text)) if text.strip() else None
        except DataError as error:
            return f"line {number} {error}"
        if problem:
            return f"line {number}: {problem}"
    return None


def _array(content: bytes, name: str) -> pyarrow.Table:
    """The texts of an array of objects or of strings."""
    try:
        rows = [{"text": row} if isinstance(row, str) else row for row in _parse(content)]
    except DataError as error:
        raise DataError(f"{name} {error}") from None
    for i, row in enumerate(rows):
        if problem := _row_problem(row):
            raise DataError(f"{name}: entry {i}: {problem}")
    if rows and not any("text" in row for row in rows):
        raise DataError(f"{name}: {_no_text(rows[0])}")
    return pyarrow.Table.from_pylist([{"text": row.get("text")} for row in rows], _SCHEMA)


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise DataError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON (cut off?): {error.msg} at byte {error.pos + 1}") from None
    except ValueError as error:  # not UTF-8, or a number of too many digits
        raise DataError(f"is not JSON: {error}") from None


def _no_text(row: dict[str, Any]) -> str:
    return f"no column 'text'; it has {', '.join(row)}. Rename one to 'text'"


def _row_problem(row: Any) -> str | None:
    if not isinstance(row, dict):
        return f'must be an object with a "text", got {type(row).__name__}'
    if not isinstance(row.get("text"), str | None):
        return f"column 'text' holds {type(row['text']).__name__}, not text"
    return None
