"""Reads a run's folder: its starts, whether it is alive, its configuration and events."""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import tomli

from torchtitan.telemetry.run_record import KINDS
from torchtitan.tools.reports.records import json_object, number, tail_lines, tail_objects, whole
from torchtitan.utils.files import read_regular, text_of
from torchtitan.utils.limits import EVENTS_TAIL_BYTES, LOG_TAIL_BYTES, RUN_FILE_BYTES
from torchtitan.utils.lock import EXPIRY_SECONDS, NAME, current_holder, read_holder
from torchtitan.utils.wording import cut, flat, path_text

RECORD = "run.json"
METRICS = "metrics.jsonl"
CONFIG = "config.toml"
EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
STATES = ("running", "completed", "preempted", "interrupted", "failed", "killed", "unknown")
UNENDED = ("running", "killed", "unknown")
"""States of runs that recorded no end."""

_EVENTS = 5000
"""Maximum number of events that are read, the latest ones."""
_MESSAGE = 1000
_LOG_LINES = 20


@dataclass
class Start:
    """One start of the run, as `run.json` records it."""

    time: float
    last_seen: float
    resumed_step: int
    step: int
    end: str | None
    ranks: int | None
    layout: dict[str, int]
    devices: dict[str, int]
    hosts: dict[str, int]
    provenance: dict[str, Any]
    """Commit and versions of the code, by name."""


@dataclass
class Folder:
    """A run's folder. Fields are empty if their file is missing or damaged."""

    path: Path
    starts: list[Start]
    goodput: dict[str, Any]
    """`percent`, or None; and the `seconds` of each kind of time that the run recorded."""
    state: str = "unknown"
    message: str = ""
    last_seen: float | None = None

    @property
    def last_start(self) -> Start | None:
        """The latest start; None if none is recorded."""
        return self.starts[-1] if self.starts else None

    def summary(self, recorded_step: int) -> dict[str, Any]:
        """A run's state in all reports, as data for JSON.

        Args:
            recorded_step: the last step in the run's metrics; `run.json` may have a later one.
        """
        last = self.last_start
        return {
            "path": path_text(self.path),
            "state": self.state,
            "message": self.message,
            "step": max(recorded_step, last.step if last else 0),
            "total_steps": self.total_steps,
            "last_seen": self.last_seen,
            "ranks": last.ranks if last else None,
            "layout": last.layout if last else {},
        }

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's configuration, by dotted key."""
        return flat(_tables(self._toml))

    @cached_property
    def total_steps(self) -> int | None:
        """`training.steps` of the run; None if unknown."""
        section = f"\n{self._toml}".partition("\n[training]\n")[2].partition("\n[")[0]
        steps = _tables(section).get("steps")  # a fifth of the file, for a table of many runs
        return whole(self.config.get("training.steps") if steps is None else steps)

    @cached_property
    def _toml(self) -> str:
        with suppress(OSError, ValueError):
            return text_of(read_regular(self.path / CONFIG, RUN_FILE_BYTES, links=True))
        return ""


def read_folder(path: Path) -> Folder:
    """Read what a run records about itself, except for its metrics."""
    record: dict[str, Any] = {}
    with suppress(OSError):
        record = json_object(read_regular(path / RECORD, RUN_FILE_BYTES, links=True))
    entries = record.get("starts")
    starts = map(_start, entries if isinstance(entries, list) else [])
    goodput = _table(record.get("goodput"))
    seconds = _table(goodput.get("seconds"))
    seconds_by_kind = {kind: number(seconds.get(kind)) for kind in KINDS}
    folder = Folder(
        path,
        [start for start in starts if start is not None],
        {
            "percent": number(goodput.get("percent")),
            "seconds": {
                kind: duration for kind, duration in seconds_by_kind.items() if duration is not None
            },
        },
    )
    if last := folder.last_start:
        folder.last_seen = last.last_seen
    else:
        with suppress(OSError):
            folder.last_seen = (path / METRICS).stat().st_mtime
    folder.state, folder.message = _state(folder, time.time())
    return folder


def _state(folder: Folder, now: float) -> tuple[str, str]:
    """The run's state and a message about it."""
    last = folder.last_start
    alive = _alive(folder.path, now)
    if alive is None and last and last.end is None:  # no lock: recent news is a sign of life
        alive = now - last.last_seen < EXPIRY_SECONDS
    if alive:
        return "running", ""
    if last is None:
        return "unknown", f"no readable {RECORD}"
    if last.end is None:
        return "killed", "the process ended without recording why"
    name, _, message = last.end.partition(": ")
    if name in STATES:
        return name, message
    return "unknown", last.end


def _alive(folder: Path, now: float) -> bool | None:
    """Whether a live process holds the folder's lock; None without a lock."""
    with suppress(OSError):
        holder, _ = read_holder(folder)
        if holder is not None:
            alive = holder.is_alive(current_holder())
            if alive is None:
                alive = now - (folder / NAME).stat().st_mtime < EXPIRY_SECONDS
            return alive
    return None


def _start(entry: Any) -> Start | None:
    """A start of `run.json`; None if it has no time."""
    get = _table(entry).get
    began = _time(get("time"))
    if began is None:
        return None
    end = get("end")
    versions = _table(get("versions"))
    provenance = {
        "git": get("git"),
        **{f"versions.{name}": version for name, version in versions.items()},
    }
    return Start(
        time=began,
        last_seen=max(began, _time(get("last_seen")) or began),
        resumed_step=whole(get("resumed_step")) or 0,
        step=whole(get("step")) or 0,
        end=cut(end, _MESSAGE) if isinstance(end, str) else None,
        ranks=whole(get("ranks")),
        layout=_counts(get("layout")),
        devices=_counts(get("devices")),
        hosts=_counts(get("hosts")),
        provenance={
            cut(key, 100): cut(value, 100)
            for key, value in provenance.items()
            if isinstance(value, str)
        },
    )


def read_events(path: Path) -> list[dict[str, Any]]:
    """The latest events by time, each with `time`, `kind`, `step` (or None) and `message`."""
    rows = [
        {
            "time": _time(event.get("time")),
            "kind": cut(str(event.get("kind")), 40),
            "step": whole(event.get("step")),
            "message": cut(str(event.get("message", "")), _MESSAGE),
        }
        for event in tail_objects(path / EVENTS, EVENTS_TAIL_BYTES)[-_EVENTS:]
    ]
    return sorted((event for event in rows if event["time"] is not None), key=itemgetter("time"))


def read_log(path: Path) -> list[str]:
    """The last lines of rank 0's log."""
    for file in (*path.glob("*/rank_0.log"), *path.glob("*/rank_0.jsonl")):
        with suppress(OSError):
            lines = tail_lines(file, LOG_TAIL_BYTES)[-_LOG_LINES:]
            return [cut(line.decode(errors="replace"), _MESSAGE) for line in lines]
    return []


def _tables(text: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        return tomli.loads(text)
    return {}


def _table(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _time(value: Any) -> float | None:
    """Seconds since the epoch; None outside the years that calendars can show."""
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < 1e11 else None


def _counts(content: Any) -> dict[str, int]:
    """A table of whole numbers."""
    counts = {cut(key, 100): whole(value) for key, value in _table(content).items()}
    return {key: value for key, value in counts.items() if value is not None}


# ---- the runs below a folder

_INNER = re.compile(
    r"step-\d+|checkpoint|tb|logs|wandb|mlruns|comm_traces|profile_traces|memory_snapshot|\..*"
)
"""Folders that hold no runs, but perhaps many files."""


class Runs:
    """Finds the runs below some folders, in the order of their paths."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.unreadable: list[str] = []
        """A message for each folder that could not be read."""
        self._seen: set[str] = set()

    def __iter__(self) -> Iterator[Path]:
        """Links are followed; no folder is visited twice."""
        for top in self.folders:
            for folder, names, files in os.walk(top, onerror=self._fail, followlinks=True):
                resolved = os.path.realpath(folder)
                if resolved in self._seen:
                    names.clear()
                    continue
                self._seen.add(resolved)
                if RECORD in files or METRICS in files:
                    yield Path(folder)
                names[:] = sorted(name for name in names if not _INNER.fullmatch(name))

    def _fail(self, error: OSError) -> None:
        self.unreadable.append(f"{error.filename}: {error.strerror or error}")
