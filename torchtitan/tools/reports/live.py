"""Live report: sent once in full, then as increments.

A generation is a report and the updates since. What was appended to a run's files becomes an
update. Any other change (a rewind, another run, a folder that vanishes) ends the generation, as
does a long log of updates: clients then reload the whole report.
"""

import gzip
import json
import os
import secrets
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchtitan.telemetry.scores import FILE as SCORES
from torchtitan.tools.reports.collect import as_report, describe, read_runs, run_names, window
from torchtitan.tools.reports.compare import LoadedRun
from torchtitan.tools.reports.folder import (
    CONFIG,
    EVENTS,
    METRICS,
    RECORD,
    SAMPLES,
    SPIKES,
    read_folder,
)
from torchtitan.tools.reports.lines import PlacedRecord, parse
from torchtitan.tools.reports.samples import by_prompt
from torchtitan.tools.reports.series import Curves, is_training
from torchtitan.utils import lock
from torchtitan.utils.files import open_regular
from torchtitan.utils.limits import EVENTS_TAIL_BYTES, METRICS_LINE_BYTES

LEAST_SECONDS = 1.0
"""Files are read at most this often, however many people watch."""
MOST_SECONDS = 300.0
"""Age of a generation: comparisons are not part of updates."""
_STATE_SECONDS = 10.0
"""A run can be found dead without a change of its files."""
_LOG_BYTES = 2**20
_CURVES = ("axes", "metrics", "validation", "evals", "sources", "experts")
_OF_GENERATION = (*_CURVES, "sampled", "events", "samples")


class Rewritten(Exception):
    """A file holds something else than before, not just more."""


class Tail:
    """Lines appended to a file."""

    def __init__(self, path: Path):
        """Begin after the last whole line that is there now."""
        self.path = path
        self.identity = None
        self.position = 0
        with suppress(OSError), open_regular(path, links=True) as file:
            stat = os.fstat(file.fileno())
            begin = max(stat.st_size - METRICS_LINE_BYTES, 0)
            self.identity = (stat.st_dev, stat.st_ino)
            self.position = (
                begin + os.pread(file.fileno(), METRICS_LINE_BYTES, begin).rfind(b"\n") + 1
            )

    def read(self) -> list[tuple[int, bytes]]:
        """The lines since the last call, each with the place where it begins.

        Raises:
            Rewritten: the file is another one than before, is shorter, or can't be read any more.
        """
        try:
            with open_regular(self.path, links=True) as file:
                stat = os.fstat(file.fileno())
                if (stat.st_dev, stat.st_ino) != self.identity or stat.st_size < self.position:
                    raise Rewritten(self.path)
                data = os.pread(file.fileno(), EVENTS_TAIL_BYTES, self.position)
        except OSError:
            if self.identity is None:
                return []
            raise Rewritten(self.path) from None
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == EVENTS_TAIL_BYTES:
            whole = len(data)  # an endless line
        found = []
        begin = self.position
        for line in data[:whole].splitlines(keepends=True):
            found.append((begin, line))
            begin += len(line)
        self.position = begin
        return found


class Follower:
    """A run, and what has changed since it was read."""

    def __init__(self, run: LoadedRun, shown: dict[str, Any], tails: tuple[Tail, Tail]):
        """
        Args:
            shown: what the report says of the run.
            tails: of its metrics and samples; may begin before the end of what `run` holds.
        """
        self.path = run.folder.path
        self.name = run.name
        self._tail, self._samples = tails
        self._head = {key: value for key, value in shown.items() if key not in _OF_GENERATION}
        self._events = shown["events"]
        self._training = list(run.curves.training)
        self._began = run.curves.began
        self._files = self._signature()
        self._looked = time.monotonic()

    def news(self) -> dict[str, Any] | None:
        """The run's changes since the last call, as a part of a report's run; None without any.

        Raises:
            Rewritten: the report has to be read again.
        """
        last = self._training[-1].step if self._training else -1
        places = _placed(self._tail.read())
        samples = by_prompt(line for _, line in self._samples.read())
        training = [p for p in places if is_training(p.record) and p.step > last]
        if any(b.step <= a.step for a, b in pairwise(training)):
            raise Rewritten(self._tail.path)
        files = self._signature()
        if files[-1] != self._files[-1]:  # a checkpoint of any step was scored
            raise Rewritten(self.path)
        now = time.monotonic()
        if not (places or samples) and files == self._files and now - self._looked < _STATE_SECONDS:
            return None
        self._files = files
        self._looked = now
        folder = read_folder(self.path)
        known_starts = self._head["starts"]
        if folder.starts and known_starts and folder.starts[0].time != known_starts[0]["time"]:
            raise Rewritten(self.path)
        since = folder.starts[-1].time if folder.starts else 0.0
        recent = [p for p in self._training if (p.record.get("time") or 0.0) >= since]
        context = recent[:1] + self._training[-1:]
        others = [p for p in places if not is_training(p.record)]
        curves = Curves(context + training, others, 1, self._began)
        shown = describe(LoadedRun(self.name, folder, curves, samples=samples))
        first_of_start = (context + training)[:1]
        latest = (self._training + training)[-1:]
        self._training = self._training[:1] + first_of_start + latest
        return self._changes(shown, bool(places))

    def _changes(self, shown: dict[str, Any], recorded: bool) -> dict[str, Any] | None:
        events = shown["events"]
        known = len(self._events)
        if events[:known] != self._events:
            raise Rewritten(self.path)
        head = {key: shown[key] for key in self._head if shown[key] != self._head[key]}
        self._head |= head
        self._events = events
        added = {"events": events[known:], "samples": shown["samples"]}
        if not (head or recorded or any(added.values())):
            return None
        return {"head": head, **added} | {key: shown[key] for key in _CURVES}

    def _signature(self) -> list[tuple[int, int, int] | None]:
        names = (RECORD, CONFIG, EVENTS, SPIKES, lock.NAME, SCORES)
        return [_identity(self.path / name) for name in names]


def _placed(lines: list[tuple[int, bytes]]) -> list[PlacedRecord]:
    """The records among the lines."""
    return [
        PlacedRecord(begin, begin + len(line), *record)
        for begin, line in lines
        if (record := parse(line))
    ]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    except OSError:
        return None


class Live:
    """What a server says about some runs. Its methods may be called from any thread."""

    def __init__(self, folders: list[Path]):
        self.folders = folders
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._generation: str | None = None
        self._log: list[bytes] = []

    @property
    def names(self) -> list[str]:
        """A name for each run."""
        return run_names(self.folders)

    def report(self) -> bytes:
        """Compressed JSON of the report and the place where its updates begin."""
        with self._lock:
            self._refresh()
            if self._generation is None:
                self._begin()
            return self._report

    def updates(self, after: str) -> bytes:
        """JSON of what is new `after` the last answer's place, or a request to reload."""
        with self._lock:
            self._refresh()
            generation, _, number = after.partition("-")
            digits = number.isascii() and number.isdigit() and len(number) < 9
            known = int(number) if digits else -1
            if generation != self._generation or not 0 <= known <= len(self._log):
                return b'{"reload": true}'
            at = f"{self._generation}-{len(self._log)}"
            return b'{"at": "%s", "runs": [%s]}' % (at.encode(), b", ".join(self._log[known:]))

    def window(self, run: int, first_step: int, last_step: int, points: int) -> bytes:
        """JSON of a run's curves between two steps, one reader at a time."""
        with self._reading:
            return _json(window(self.folders[run], first_step, last_step, points))

    def _begin(self) -> None:
        tails = [(Tail(path / METRICS), Tail(path / SAMPLES)) for path in self.folders]
        runs = read_runs(self.folders)  # after the tails: nothing is missed between them
        report = as_report(runs)
        self._generation = secrets.token_hex(4)
        self._log = []
        self._began = time.monotonic()
        self._refreshed = self._began
        self._followers = [Follower(*one) for one in zip(runs, report["runs"], tails, strict=True)]
        answer = {"at": f"{self._generation}-0", "report": report}
        self._report = gzip.compress(_json(answer), 3)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._generation is None or now - self._refreshed < LEAST_SECONDS:
            return
        self._refreshed = now
        try:
            for i, follower in enumerate(self._followers):
                if news := follower.news():
                    self._log.append(_json([i, news]))
        except Rewritten:
            self._generation = None
            return
        logged = sum(map(len, self._log))
        if logged and (now - self._began > MOST_SECONDS or logged > _LOG_BYTES):
            self._generation = None


def _json(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
