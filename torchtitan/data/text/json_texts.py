"""JSON of the Hugging Face hub, which `datasets` streams through this module as unparsed lines.

The reader of `datasets` infers a type for everything in a line, which recurses in C++: brackets
nested 100,000 deep overflow the stack and kill the process. And one line should not decide whether
the others can be read.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow
from datasets.builder import Key
from datasets.packaged_modules.json.json import Json

from torchtitan.data.text.json_records import records_of
from torchtitan.data.text.retry import DataError
from torchtitan.data.text.texts import BadDocument, Record

_BATCH = 4 * 2**20
"""Bytes of lines in a table."""
_COLUMNS = {
    "json_line": pyarrow.large_binary(),
    "number": pyarrow.int64(),
    "file": pyarrow.string(),
    "kind": pyarrow.string(),
    "problem": pyarrow.string(),
}
"""A line or array entry, its place, and the problem if it can't be read."""


class JsonTexts(Json):
    """The builder that `datasets` uses for JSON, in files or from the hub."""

    def _split_generators(self, dl_manager: Any) -> Any:
        self.info.features = None  # of the parsed lines, from the data set's card
        return super()._split_generators(dl_manager)

    def _generate_tables(
        self, files_iterables: Iterable[Any], **_: Any
    ) -> Iterator[tuple[Key, pyarrow.Table]]:
        for shard, files in enumerate(files_iterables):
            # `open`, in this module, is replaced by `datasets`: it decompresses, and reads URLs.
            for name in files:
                with open(name, "rb") as file:
                    try:
                        for part, rows in enumerate(_batches(records_of(file), str(name))):
                            table = pyarrow.Table.from_pylist(rows, pyarrow.schema(_COLUMNS))
                            yield Key(shard, part), table
                    except DataError as error:
                        raise DataError(f"{name}: {error}") from None


def _batches(records: Iterable[Record], name: str) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for record in records:
        content = record.content
        row: dict[str, Any] = {"number": record.number, "file": name}
        if isinstance(content, BadDocument):
            row |= {"kind": content.kind, "problem": str(content)}
        else:
            line = content if isinstance(content, bytes) else json.dumps(content).encode()
            row["json_line"] = line
            size += len(line)
        rows.append(row)
        if size > _BATCH:
            yield rows
            rows = []
            size = 0
    if rows:
        yield rows


def content_of(row: dict[str, Any]) -> Any:
    """The content for `records.decode` of a row of JSON or of another format."""
    if "json_line" not in row:
        return row
    return BadDocument(row["kind"], row["problem"]) if row["kind"] else row["json_line"]


def place_of(row: dict[str, Any]) -> str:
    """The name of a row of JSON in messages."""
    return f"{row['file']}: line {row['number']}: " if "json_line" in row else ""
