"""Records of `metrics.jsonl`: JSON lines with a step and numbers.

A run may be writing the file: a line without its newline isn't a record yet. Lines that can't be
parsed are skipped.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.utils.files import open_regular
from torchtitan.utils.limits import METRICS_LINE_BYTES, METRICS_TAIL_BYTES

_ENTRIES = 1024
"""Maximum number of entries that are read of a record."""
_LARGEST_WHOLE = 2**53
_LARGEST = 1e60
"""Largest accepted magnitude: above float32's maximum, yet products stay finite."""
_NUMBERS = (int, float, type(None))


class MetricsRecord(NamedTuple):
    """The metrics that were recorded at a step."""

    step: int
    values: dict[str, float | None]
    """Values by name; None for a value that isn't finite."""

    @property
    def is_training(self) -> bool:
        """Whether a training step made the record, not a validation or benchmark."""
        return "loss" in self.values


def read_records(path: Path) -> Iterator[MetricsRecord]:
    """The records of a file, in its order.

    Raises:
        OSError: the file can't be read, or isn't a regular file.
    """
    with open_regular(path, links=True) as file:
        at_begin = True
        while line := file.readline(METRICS_LINE_BYTES):
            is_whole = line.endswith(b"\n")
            if at_begin and is_whole and (record := parse(line)):
                yield record
            at_begin = is_whole


def last_training(path: Path) -> MetricsRecord | None:
    """The last training record near the end of a file.

    Raises:
        OSError: the file can't be read, or isn't a regular file.
    """
    for line in reversed(tail_lines(path, METRICS_TAIL_BYTES)):
        if (record := parse(line)) and record.is_training:
            return record
    return None


def parse(line: bytes) -> MetricsRecord | None:
    """Parse a line; None if it isn't an object with a step."""
    content = json_object(line)
    step = whole(content.get("step"))
    if step is None:
        return None
    entries = islice(content.items(), _ENTRIES)
    return MetricsRecord(
        step, {key: number(value) for key, value in entries if type(value) in _NUMBERS}
    )


def tail_lines(path: Path, most: int) -> list[bytes]:
    """The whole lines in the last `most` bytes of a file.

    Raises:
        OSError: the file can't be read, or isn't a regular file.
    """
    with open_regular(path, links=True) as file:
        begin = file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
        return file.read(most).split(b"\n")[1 if begin else 0 : -1]


def tail_objects(path: Path, most: int) -> list[dict[str, Any]]:
    """The objects in the last `most` bytes of a file of JSON lines; none if it can't be read."""
    with suppress(OSError):
        return list(filter(None, map(json_object, tail_lines(path, most))))
    return []


def json_object(text: bytes) -> dict[str, Any]:
    """The object that JSON text holds; an empty one if it holds none."""
    with suppress(ValueError, RecursionError):
        content = json.loads(text)
        if isinstance(content, dict):
            return content
    return {}


def whole(value: Any) -> int | None:
    """`value` if it is a whole number that a step may have; else None."""
    return value if type(value) is int and 0 <= value < _LARGEST_WHOLE else None


def number(value: Any) -> float | None:
    """`value` if it is a finite number up to `_LARGEST`; else None."""
    usable = type(value) in (int, float) and -_LARGEST < value < _LARGEST
    return value if usable else None
