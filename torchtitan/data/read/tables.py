"""The text's column of Parquet, CSV and Arrow files, row by row.

    parquet_rows(file, column)  ->  {column: value}, ...

Strings of Parquet and Arrow are bytes, because Arrow doesn't check UTF-8 (`records.decode` does).
At most a batch of rows is held.
"""

import csv
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import IO, Any, cast

from torchtitan.data.read.opening import BadDocument, DataError

_BUFFER = 2**20
_BATCH_ROWS = 256
"""Number of rows that are read at once."""
_BATCH_BYTES = 16 * 2**20
"""Bytes of these rows, estimated by the mean of their row group; at least one row is read."""
_ARROW_FILE = b"ARROW1"
"""Beginning of Arrow's file format."""
_CONTENT_ERRORS = (OSError, ValueError, RuntimeError, LookupError, TypeError, Warning)
"""Errors that the libraries raise about contents."""


def parquet_rows(file: IO[bytes], column: str, advance: Callable[[int], None]) -> Iterator[Any]:
    """
    Args:
        advance: called with the number of bytes of every read.

    Raises:
        DataError: it is no Parquet file, or damaged.
    """
    import pyarrow.parquet

    with _damage_reported("a Parquet file"):
        # With a buffer, pages are read one by one instead of a row group's whole column.
        table = pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER)
        metadata = table.metadata
        if _index(table.schema_arrow, column) is None:
            yield from [no_column_error(column, table.schema_arrow.names)] * metadata.num_rows
            return
        bytes_read = 0
        for group in range(metadata.num_row_groups):
            rows = _rows_at_once(metadata.row_group(group), column)
            for batch in table.iter_batches(
                rows, row_groups=[group], columns=[column], use_threads=False
            ):
                yield from _rows(batch, column)
                end = max(bytes_read, file.tell())
                advance(end - bytes_read)
                bytes_read = end


def _rows(batch: Any, column: str) -> Iterator[Any]:
    # Selecting the column "meta.text" also selects `text` in a struct `meta`.
    values = batch.column(_index(batch.schema, column))
    for start in range(0, len(values), _BATCH_ROWS):
        for value in _as_binary(values.slice(start, _BATCH_ROWS)).to_pylist():
            yield {column: value}


def _rows_at_once(group: Any, column: str) -> int:
    size = 0
    for i in range(group.num_columns):
        chunk = group.column(i)
        if f"{chunk.path_in_schema}.".startswith(f"{column}."):  # a list's path is longer
            size += chunk.total_uncompressed_size
    mean = size / max(group.num_rows, 1)
    return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(mean, 1))))


def _index(schema: Any, column: str) -> int | None:
    """Index of the column with exactly this name; None if there is none."""
    indices = schema.get_all_field_indices(column)
    if len(indices) > 1:
        raise DataError(
            f"has {len(indices)} columns {column!r}; the one of the text must have a name of its "
            "own"
        )
    return indices[0] if indices else None


def _as_binary(values: Any) -> Any:
    """Strings as binary values, because strings of a Parquet file may not be UTF-8."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(values.type):
        texts = _as_binary(values.dictionary)
        return pyarrow.DictionaryArray.from_arrays(values.indices, texts).dictionary_decode()
    if types.is_string(values.type):
        return values.view(pyarrow.binary())
    if types.is_large_string(values.type):
        return values.view(pyarrow.large_binary())
    if types.is_string_view(values.type):
        return values.cast(pyarrow.large_binary())
    return values


@contextmanager
def _damage_reported(what: str) -> Iterator[None]:
    """Turn a library's errors about contents into `DataError`, but no errors of the disk."""
    from pyarrow import ArrowException, ArrowMemoryError

    try:
        yield
    except DataError:
        raise
    except ArrowMemoryError as error:  # of a size that is damaged, or true
        raise DataError(f"a part doesn't fit in memory (damaged?): {error}") from None
    except (ArrowException, *_CONTENT_ERRORS) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"not {what} (damaged or cut off?): {reason[0]}") from None


def arrow_rows(file: IO[bytes], column: str) -> Iterator[Any]:
    """The rows of Arrow's stream or file format. What its metadata says about a column is ignored:
    the library `datasets` would open files and addresses in a column declared to hold images.

    Raises:
        BadDocument: there is no such column.
        DataError: it is no Arrow file, or damaged.
    """
    import pyarrow
    from pyarrow import types

    with _damage_reported("an Arrow file"):
        start = file.read(len(_ARROW_FILE))
        file.seek(0)
        options = pyarrow.ipc.IpcReadOptions(use_threads=False)
        if start == _ARROW_FILE:
            table = pyarrow.ipc.open_file(file, options=options)
            batches = map(table.get_batch, range(table.num_record_batches))
        else:
            table = batches = pyarrow.ipc.open_stream(file, options=options)
        index = _index(table.schema, column)
        if index is None:
            raise no_column_error(column, table.schema.names)
        for batch in batches:
            values = batch.column(index)
            if types.is_string(values.type) or types.is_large_string(values.type):
                values = _as_binary(values)  # a document that isn't UTF-8 may be skipped
            values.validate(full=True)  # else its offsets may lie beyond its bytes
            yield from _rows(batch, column)


def csv_rows(file: IO[bytes], separator: str, column: str) -> Iterator[Any]:
    """The rows of a CSV file, every field as unchanged text.

    Raises:
        BadDocument: there is no such column.
        DataError: the file is damaged, or its rows have more fields than its header.
    """
    import pandas

    line = cast(BufferedReader, file).peek(_BUFFER).partition(b"\n")[0].decode(errors="replace")
    header = [line[: 2**16].strip("\ufeff\r")]
    columns = {char: next(csv.reader(header, delimiter=char), []) for char in ",;\t|"}
    for other, names in columns.items():
        if column in names and column not in columns[separator]:
            raise DataError(
                f"its fields are separated by {other!r}, not {separator!r}; write it with that"
            )
    with (
        warnings.catch_warnings(),
        _damage_reported("a CSV file" if separator == "," else "a TSV file"),
    ):
        warnings.filterwarnings("error", message="Length of header or names does not match")
        for chunk in pandas.read_csv(
            file,
            sep=separator,
            index_col=False,
            dtype=object,
            keep_default_na=False,
            chunksize=_BATCH_ROWS,
        ):
            if column not in chunk:
                raise no_column_error(column, chunk.columns)
            for value in chunk[column]:
                yield {column: value}


def no_column_error(column: str, names: Iterable[object]) -> BadDocument:
    """The error about a document without the column of the text."""
    has = ", ".join(map(str, names)) or "none"
    advice = (
        "Name the column that holds the text as text_column, or conversations as messages_column"
    )
    return BadDocument(f"no column {column}", f"no column {column!r}; it has {has}. {advice}")
