"""Records of `metrics.jsonl`: JSON lines with a step and numbers.

A run may be writing the file: a line without its newline isn't a record yet. Lines that can't be
parsed are skipped.
"""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.utils.files import open_regular
from torchtitan.utils.limits import METRICS_LINE_BYTES, METRICS_TAIL_BYTES

_ENTRIES = 1024
"""Maximum number of entries that are read of a record."""
_LARGEST_STEP = 2**53
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
    with open_regular(path, links=True) as file:
        begin = max(os.fstat(file.fileno()).st_size - METRICS_TAIL_BYTES, 0)
        file.seek(begin)
        lines = file.read(METRICS_TAIL_BYTES).split(b"\n")
    for line in reversed(lines[1 if begin else 0 : -1]):
        if (record := parse(line)) and record.is_training:
            return record
    return None


def parse(line: bytes) -> MetricsRecord | None:
    """Parse a line; None if it isn't an object with a step."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = step_of(content)
    if step is None:
        return None
    entries = islice(content.items(), _ENTRIES)
    return MetricsRecord(
        step, {key: number(value) for key, value in entries if type(value) in _NUMBERS}
    )


def step_of(content: Any) -> int | None:
    """The step of a decoded line; None if it isn't a record."""
    step = content.get("step") if isinstance(content, dict) else None
    return step if type(step) is int and 0 <= step < _LARGEST_STEP else None


def number(value: Any) -> float | None:
    """`value` if it is a finite number up to `_LARGEST`; else None."""
    usable = type(value) in (int, float) and -_LARGEST < value < _LARGEST
    return value if usable else None
