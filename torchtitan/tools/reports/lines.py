"""Records of JSON lines by place or by step, at a cost that doesn't grow with the file.

A file is seen as it was when it was opened, up to its last whole line: one that is appended to, or
replaced by a rewind, may be read meanwhile. Whatever it holds, bytes read and memory are bounded.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from torchtitan.utils.files import open_regular
from torchtitan.utils.limits import METRICS_LINE_BYTES, METRICS_READ_BYTES

Record = dict[str, float | None]
"""Names to numbers; None for one that isn't finite."""

DENSE = 4096
"""Bytes per point up to which all records are read, not samples of them."""
_ENTRIES = 1024
"""Entries of a record, at most."""
_BLOCK = 4096
_WRONG = 64
"""Lines that are no records, in succession, after which a search gives up."""
_LARGEST_STEP = 2**53
_LARGEST = 1e60
"""Largest accepted magnitude: above float32's maximum, yet products stay finite."""
_NUMBERS = (int, float, type(None))


class PlacedRecord(NamedTuple):
    """A record and where it is."""

    begin: int
    end: int
    """Where the next line begins."""
    step: int
    record: Record


class Sample(NamedTuple):
    """Records of a part of a file."""

    found: list[PlacedRecord]
    others: list[PlacedRecord]
    """Records that are not wanted: those that were seen, or all if `whole`."""
    every: int
    """One of so many wanted records was found; about, if not `whole`."""
    whole: bool


def parse(line: bytes) -> tuple[int, Record] | None:
    """Step and numbers of a line; None if it isn't an object with a step."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = step_of(content)
    if step is None:
        return None
    return step, {
        key: number(value)
        for key, value in islice(content.items(), _ENTRIES)
        if type(value) in _NUMBERS
    }


def step_of(content: Any) -> int | None:
    """The step of a record; None if this is none."""
    step = content.get("step") if isinstance(content, dict) else None
    return step if type(step) is int and 0 <= step < _LARGEST_STEP else None


def number(value: Any) -> float | None:
    """`value` if it is a finite number, and not absurdly large; else None."""
    usable = type(value) in (int, float) and -_LARGEST < value < _LARGEST
    return value if usable else None


class JsonLines:
    """A file of records that are in the order of their steps."""

    def __init__(self, path: Path):
        """Open a file.

        Raises:
            OSError: it can't be read, or isn't a regular file.
        """
        self._file = open_regular(path, links=True)
        self.size = os.fstat(self._file.fileno()).st_size
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    # ---- by place

    def places(
        self, first: int = 0, after: int | None = None, reach: int = METRICS_LINE_BYTES
    ) -> Iterator[PlacedRecord]:
        """Records that begin in `[first, after)`; stops after `_WRONG` bad lines in succession.

        Args:
            reach: bytes to read, at most, in search of the end of a line.
        """
        wrong = 0
        for begin, line in self._lines(first, reach):
            if after is not None and begin >= after:
                return
            if found := parse(line):
                wrong = 0
                yield PlacedRecord(begin, begin + len(line) + 1, *found)
            elif (wrong := wrong + 1) == _WRONG:
                return

    def last(self, wanted: Callable[[Record], bool], most: int = 1) -> list[PlacedRecord]:
        """The last `most` wanted records, or fewer if they are far apart."""
        reach = max(_BLOCK, most * 1024)
        while True:
            first = max(self.size - reach, 0)
            found = []
            for begin, line in reversed(list(self._lines(first, reach))):
                parsed = parse(line)
                if parsed and wanted(parsed[1]):
                    found.append(PlacedRecord(begin, begin + len(line) + 1, *parsed))
                    if len(found) == most:
                        break
            if len(found) == most or not first or reach >= max(METRICS_LINE_BYTES, most * DENSE):
                return found[::-1]
            reach *= 4

    def sample(
        self,
        points: int,
        wanted: Callable[[Record], bool],
        first: int = 0,
        after: int | None = None,
    ) -> Sample:
        """About `points` wanted records, evenly spaced over `[first, after)`, with its last one.

        A part of at most `DENSE` bytes per point is read whole.
        """
        after = self.size if after is None else after
        if after - first <= points * DENSE:
            places = list(self.places(first, after))
            found = [place for place in places if wanted(place.record)]
            every = max(1, math.ceil(len(found) / points))
            thinned = found[::every]
            if found and thinned[-1] is not found[-1]:
                thinned.append(found[-1])
            others = [place for place in places if not wanted(place.record)]
            return Sample(thinned, others, every, True)
        found, others = self._spaced(points - 1, wanted, first, after)
        ending = self.places(max(first, after - 16 * _BLOCK), after)
        last = [place for place in ending if wanted(place.record)][-1:]
        if last and (not found or last[0].begin > found[-1].begin):
            found += last
        length = sum(place.end - place.begin for place in found) / (len(found) or 1)
        records = (after - first) / (length or 1)
        return Sample(found, others, max(1, round(records / points)), False)

    def _spaced(
        self, points: int, wanted: Callable[[Record], bool], first: int, after: int
    ) -> tuple[list[PlacedRecord], list[PlacedRecord]]:
        """The first wanted record after each of `points` places, and the other records seen."""
        found: list[PlacedRecord] = []
        others: list[PlacedRecord] = []
        reach = METRICS_LINE_BYTES
        for i in range(points):
            offset = first + i * (after - first) // points
            if found and offset < found[-1].end:
                continue
            seen = None
            for seen in self.places(offset, after, reach):
                if wanted(seen.record):
                    found.append(seen)
                    break
                others.append(seen)
            # Within an endless line: don't read it again for each point.
            reach = METRICS_LINE_BYTES if seen else 16 * _BLOCK
        return found, others

    # ---- by step

    def find(
        self, step: int, below: PlacedRecord | None = None, above: PlacedRecord | None = None
    ) -> int:
        """Offset of the first record of `step` or later; the end of the part if there is none.

        Steps mostly grow evenly, so a search by interpolation takes one or two reads; every second
        read halves the part, whatever the steps are.

        Args:
            below, above: records of earlier and of later steps, which bound the search.
        """
        low = below.end if below else 0
        low_step = below.step if below else 0
        high = above.begin if above else self.size
        high_step = above.step if above else None
        end = high
        halve = False
        while high - low > _BLOCK:
            middle = (low + high) // 2
            if high_step is not None and high_step > low_step and not halve:
                share = (step - low_step) / (high_step - low_step)
                guess = low + int(share * (high - low)) - _BLOCK // 4
                middle = min(max(low, guess), high - 1)
            halve = not halve
            seen = list(self.places(middle, min(middle + _BLOCK // 2, high)))
            if not seen:
                seen = list(islice(self.places(middle, high), 1))
            at = next((i for i, place in enumerate(seen) if place.step >= step), None)
            if at or (at == 0 and middle == low):
                return seen[at].begin
            if seen and at is None:
                low = seen[-1].end
                low_step = seen[-1].step
            else:
                high = middle
                high_step = seen[0].step if seen else None
        return next((place.begin for place in self.places(low, end) if place.step >= step), end)

    def of_step(
        self, step: int, below: PlacedRecord | None = None, above: PlacedRecord | None = None
    ) -> list[PlacedRecord]:
        """The records of a step, searched as by `find`."""
        found = []
        for place in self.places(self.find(step, below, above)):
            if place.step != step:
                break
            found.append(place)
        return found

    # ---- bytes

    def _lines(self, first: int, reach: int) -> Iterator[tuple[int, bytes]]:
        """Whole lines that begin at `first` or later, each with where it begins."""
        begin = max(first - 1, 0)  # the byte before tells whether a line begins at `first`
        held = b""
        inside = first > 0
        block = _BLOCK
        beyond = 0
        while data := self._read(begin + len(held), block):
            block = min(2 * block, METRICS_LINE_BYTES)
            *lines, rest = (held + data).split(b"\n")
            beyond = 0 if lines else beyond + len(data)
            for line in lines:
                if inside:
                    inside = False
                else:
                    yield begin, line
                begin += len(line) + 1
            held = rest
            if beyond >= reach and inside:
                return
            if len(held) > METRICS_LINE_BYTES or inside:  # too long, or its beginning not seen
                begin += len(held)
                held = b""
                inside = True

    def _read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size - offset, METRICS_READ_BYTES - self.bytes_read)
        data = os.pread(self._file.fileno(), length, offset) if length > 0 else b""
        self.bytes_read += len(data)
        return data
