"""The text's column of Parquet, Arrow and CSV files, row by row.

    parquet_rows(file, column)  ->  Record(row, {column: value}), ...

Strings of Parquet and Arrow are bytes, because Arrow doesn't check UTF-8 (`records.decode` does);
long ones are `HeldBytes`, without a copy. At most a batch of rows is held.
"""

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from torchtitan.data.text.retry import DataError
from torchtitan.data.text.texts import BLOCK, LONG, BadDocument, HeldBytes, Record, missing_column
from torchtitan.utils.limits import RECORD_BYTES

_ROWS = 256
"""Number of rows of Parquet that are read at once, or of Arrow that become Python's."""
_BATCH = 16 * 2**20
"""Bytes of these rows, estimated by the mean of their row group; at least one row is read."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def parquet_rows(
    file: IO[bytes], column: str, advance: Callable[[int], None] | None = None
) -> Iterator[Record]:
    """
    Raises:
        DataError: it is no Parquet file, or damaged.
    """
    import pyarrow.parquet

    with _damage("a Parquet file"):
        # With a buffer, pages are read one by one instead of a row group's whole column.
        table = pyarrow.parquet.ParquetFile(file, buffer_size=BLOCK)
        metadata = table.metadata
        if _index(table.schema_arrow, column) is None:
            bad = missing_column(column, table.schema_arrow.names)
            yield from (Record(i + 1, bad) for i in range(metadata.num_rows))
            return
        number = 0
        read = 0
        for group in range(metadata.num_row_groups):
            rows = _rows_at_once(metadata.row_group(group), column)
            for batch in table.iter_batches(
                rows, row_groups=[group], columns=[column], use_threads=False
            ):
                # `columns` also selects `text` in a struct `meta` for "meta.text".
                for value in _values(batch.column(_index(batch.schema, column))):
                    number += 1
                    yield Record(number, {column: value})
                read = _report(file, read, advance)


def _rows_at_once(group: Any, column: str) -> int:
    size = 0
    for i in range(group.num_columns):
        chunk = group.column(i)
        if f"{chunk.path_in_schema}.".startswith(f"{column}."):  # a list's path is longer
            size += chunk.total_uncompressed_size
    mean = size / max(group.num_rows, 1)
    return max(1, min(_ROWS, int(_BATCH / max(mean, 1))))


def arrow_rows(
    file: IO[bytes], column: str, advance: Callable[[int], None] | None = None
) -> Iterator[Record]:
    """The rows of an Arrow file or stream. A record batch is held at a time; of a file, its text.

    Raises:
        DataError: it is neither, or damaged.
    """
    with _damage("an Arrow file"):
        number = 0
        read = 0
        for values, names in _arrow_batches(file, column):
            for value in values:
                number += 1
                content = missing_column(column, names) if value is _MISSING else {column: value}
                yield Record(number, content)
            read = _report(file, read, advance)


_MISSING = object()


def _arrow_batches(file: IO[bytes], column: str) -> Iterator[tuple[Iterator[Any], list[str]]]:
    """The column's values in each batch, and the names of all columns."""
    import pyarrow.ipc

    magic = file.read(6)
    if magic.startswith(b"FEA1"):
        raise DataError(
            "Feather version 1 isn't read; write version 2 (the default of pyarrow and "
            "pandas), or Parquet"
        )
    is_file = magic == b"ARROW1"
    if not is_file:
        file.seek(max(file.seek(0, io.SEEK_END) - len(_END_OF_STREAM), 0))
        if file.read() != _END_OF_STREAM:
            raise DataError(
                "not an Arrow file (damaged or cut off?): it doesn't end with the mark "
                "of a stream's end"
            )
    open_reader = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    file.seek(0)
    schema = open_reader(file).schema
    index = _index(schema, column)
    options = pyarrow.ipc.IpcReadOptions(included_fields=[index or 0], use_threads=False)
    file.seek(0)
    reader = open_reader(file, options=options)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        values = iter([_MISSING] * batch.num_rows) if index is None else _values(batch.column(0))
        yield values, schema.names


def _index(schema: Any, column: str) -> int | None:
    """Index of the column with exactly this name; None if there is none."""
    found = schema.get_all_field_indices(column)
    if len(found) > 1:
        raise DataError(
            f"has {len(found)} columns {column!r}; the one of the text must have a name of its own"
        )
    return found[0] if found else None


def _values(values: Any) -> Iterator[Any]:
    """The values of an Arrow array."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(values.type):
        texts = _as_binary(values.dictionary)
        coded = pyarrow.DictionaryArray.from_arrays(values.indices, texts)
        for first in range(0, len(coded), _ROWS):
            yield from _values(coded.slice(first, _ROWS).dictionary_decode())
        return
    values = _as_binary(values)
    is_text = types.is_binary(values.type) or types.is_large_binary(values.type)
    if not is_text or values.nbytes <= LONG:
        for first in range(0, len(values), _ROWS):
            yield from values.slice(first, _ROWS).to_pylist()
        return
    # A scalar would copy the value.
    width = np.int32 if types.is_binary(values.type) else np.int64
    _, places, content = values.buffers()
    ends = np.frombuffer(places, width)[values.offset : values.offset + len(values) + 1].tolist()
    for start, end, valid in zip(ends, ends[1:], values.is_valid().to_pylist(), strict=False):
        text = content.slice(start, end - start)
        if valid:
            yield HeldBytes(text) if len(text) > LONG else text.to_pybytes()
        else:
            yield None


def _as_binary(values: Any) -> Any:
    """Strings as binary values, validated: a wrong place in the bytes would end the process."""
    import pyarrow
    from pyarrow import types

    if types.is_string(values.type):
        values = values.view(pyarrow.binary())
    elif types.is_large_string(values.type):
        values = values.view(pyarrow.large_binary())
    elif types.is_string_view(values.type) or types.is_binary_view(values.type):
        values.validate(full=True)
        values = values.cast(pyarrow.large_binary())
    values.validate(full=True)
    return values


def _report(file: IO[bytes], read: int, advance: Callable[[int], None] | None) -> int:
    """Report how far a file has been read since `read`; returns the new place."""
    place = max(read, file.tell())
    if advance:
        advance(place - read)
    return place


@contextmanager
def _damage(what: str) -> Iterator[None]:
    """Turn Arrow's errors about contents into `DataError`, but not those of the disk."""
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except pyarrow.ArrowMemoryError as error:  # of a size that is damaged, or true
        raise DataError(f"a part doesn't fit in memory (damaged?): {error}") from None
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"not {what} (damaged or cut off?): {reason[0]}") from None


def csv_rows(file: IO[bytes], column: str, delimiter: str) -> Iterator[Record]:
    """The rows below the header, numbered by the first of their lines. Blank lines are left out.

    Raises:
        DataError: a quote is opened and not closed, or stands where none may; rows can't be told
        apart from there on.
    """
    csv.field_size_limit(RECORD_BYTES)
    # Bytes that aren't UTF-8 become lone surrogates, so that only their row is bad.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise DataError(
                f"line {line}: not CSV: {error} (is a quote not closed, or not doubled?)"
            ) from None
        if row is None:
            return
        if not row:
            continue
        if header is None:
            header = row
            if header.count(column) > 1:
                raise DataError(f"the header has {header.count(column)} columns {column!r}")
            continue
        yield Record(line, _csv_content(row, header, column))


def _csv_content(row: list[str], header: list[str], column: str) -> Any:
    if column not in header:
        return missing_column(column, header)
    if len(row) != len(header):
        problem = (
            f"{len(row)} fields instead of the header's {len(header)} (a delimiter or line "
            "break not in quotes?)"
        )
        return BadDocument("wrong number of fields", problem)
    return {column: row[header.index(column)]}
