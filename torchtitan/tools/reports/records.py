"""Records of `metrics.jsonl`: JSON lines with a step and numbers.

A run may be writing the file: a line without its end isn't a record yet, and one that can't be read
is passed over.
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
"""Maximum number of entries of a record."""
_LARGEST_STEP = 2**53
_LARGEST = 1e60
"""Largest accepted magnitude: above float32's maximum, yet products stay finite."""
_NUMBERS = (int, float, type(None))


class Record(NamedTuple):
    """What was recorded of a step."""

    step: int
    values: dict[str, float | None]
    """Numbers by name; None for one that isn't finite."""

    @property
    def is_training(self) -> bool:
        """Whether a training step recorded it; others are of validations and benchmarks."""
        return "loss" in self.values


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in its order.

    Raises:
        OSError: it can't be read, or isn't a regular file.
    """
    with open_regular(path, links=True) as file:
        at_begin = True
        while line := file.readline(METRICS_LINE_BYTES):
            is_whole = line.endswith(b"\n")
            if at_begin and is_whole and (record := parse(line)):
                yield record
            at_begin = is_whole


def last_training(path: Path) -> Record | None:
    """The last training record near the end of a file.

    Raises:
        OSError: it can't be read, or isn't a regular file.
    """
    with open_regular(path, links=True) as file:
        begin = max(os.fstat(file.fileno()).st_size - METRICS_TAIL_BYTES, 0)
        file.seek(begin)
        lines = file.read(METRICS_TAIL_BYTES).split(b"\n")
    for line in reversed(lines[1 if begin else 0 : -1]):
        if (record := parse(line)) and record.is_training:
            return record
    return None


def parse(line: bytes) -> Record | None:
    """The record of a line; None if it isn't an object with a step."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = step_of(content)
    if step is None:
        return None
    entries = islice(content.items(), _ENTRIES)
    return Record(step, {key: number(value) for key, value in entries if type(value) in _NUMBERS})


def step_of(content: Any) -> int | None:
    """The step of a record; None if this is none."""
    step = content.get("step") if isinstance(content, dict) else None
    return step if type(step) is int and 0 <= step < _LARGEST_STEP else None


def number(value: Any) -> float | None:
    """`value` if it is a finite number, and not absurdly large; else None."""
    usable = type(value) in (int, float) and -_LARGEST < value < _LARGEST
    return value if usable else None
