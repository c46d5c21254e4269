"""Reads a run's folder: its starts, whether it is alive, its configuration and events."""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli
from pydantic import ValidationError

from torchtitan.telemetry.planned import Planned, state_gib
from torchtitan.telemetry.run_record import KINDS
from torchtitan.tools.reports.records import number
from torchtitan.utils.files import open_regular, read_regular, text_of
from torchtitan.utils.limits import EVENTS_TAIL_BYTES, RUN_FILE_BYTES
from torchtitan.utils.lock import EXPIRY_SECONDS, NAME, current_holder, read_holder
from torchtitan.utils.wording import cut, flat

RECORD = "run.json"
METRICS = "metrics.jsonl"
CONFIG = "config.toml"
EVENTS = "events.jsonl"
SPIKES = "guard.jsonl"
SAMPLES = "samples.jsonl"
STATES = ("running", "completed", "preempted", "interrupted", "failed", "killed", "unknown")

_EVENTS = 5000
"""Maximum number of events that are read, the latest ones."""
_MESSAGE = 1000


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
    plan: Planned | None = None
    saves_s: float | None = None
    """Seconds that training waited for saves."""
    state_gib: dict[str, float] = field(default_factory=dict)
    """Memory of rank 0's parameters, gradients and optimizer state."""


@dataclass
class Folder:
    """A run's folder. Fields are empty if their file is missing or damaged."""

    path: Path
    starts: list[Start] = field(default_factory=list)
    goodput: dict[str, Any] = field(default_factory=lambda: {"percent": None, "seconds": {}})
    state: str = "unknown"
    message: str = ""
    last_seen: float | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's configuration, by dotted key."""
        return flat(_tables(self._toml))

    @cached_property
    def total_steps(self) -> int | None:
        """`training.steps` of the run; None if unknown."""
        section = f"\n{self._toml}".partition("\n[training]\n")[2].partition("\n[")[0]
        steps = _tables(section).get("steps")  # a fifth of the file, for a table of many runs
        return _whole(self.config.get("training.steps") if steps is None else steps)

    @cached_property
    def _toml(self) -> str:
        try:
            return text_of(read_regular(self.path / CONFIG, RUN_FILE_BYTES, links=True))
        except (OSError, ValueError):
            return ""


def read_folder(path: Path, *, now: float | None = None) -> Folder:
    """Read what a run records about itself, except for its metrics."""
    folder = Folder(path)
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_regular(path / RECORD, RUN_FILE_BYTES, links=True))
        folder.starts = [
            start for entry in _list(_get(content, "starts")) if (start := _start(entry))
        ]
        folder.goodput = _goodput(_get(content, "goodput"))
    folder.last_seen = folder.starts[-1].last_seen if folder.starts else _modified(path / METRICS)
    folder.state, folder.message = _state(folder, time.time() if now is None else now)
    return folder


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _state(folder: Folder, now: float) -> tuple[str, str]:
    """The run's state and a message about it."""
    end = folder.starts[-1].end if folder.starts else None
    alive = _alive(folder.path, now)
    if alive is None and end is None and folder.starts:  # no lock: recent news is a sign of life
        alive = now - folder.starts[-1].last_seen < EXPIRY_SECONDS
    if alive:
        return "running", ""
    if not folder.starts:
        return "unknown", f"no readable {RECORD}"
    if end is None:
        return "killed", "the process ended without recording why"
    name, _, message = end.partition(": ")
    if name in STATES:
        return name, message
    return "unknown", end


def _alive(folder: Path, now: float) -> bool | None:
    """Whether a live process holds the folder's lock; None without a lock."""
    try:
        holder, _ = read_holder(folder)
        if holder is None:
            return None
        alive = holder.is_alive(current_holder())
        if alive is None:
            alive = now - (folder / NAME).stat().st_mtime < EXPIRY_SECONDS
        return alive
    except OSError:
        return None


def _start(entry: Any) -> Start | None:
    began = _time(_get(entry, "time"))
    if began is None:
        return None
    last_seen = _time(_get(entry, "last_seen"))
    end = _get(entry, "end")
    code_versions = {"git": _get(entry, "git")}
    versions = _get(entry, "versions")
    if isinstance(versions, dict):
        code_versions |= {f"versions.{name}": version for name, version in versions.items()}
    return Start(
        time=began,
        last_seen=max(began, last_seen or began),
        resumed_step=_whole(_get(entry, "resumed_step")) or 0,
        step=_whole(_get(entry, "step")) or 0,
        end=cut(end, _MESSAGE) if isinstance(end, str) else None,
        ranks=_whole(_get(entry, "ranks")),
        layout=_counts(_get(entry, "layout")),
        devices=_counts(_get(entry, "devices")),
        hosts=_counts(_get(entry, "hosts")),
        provenance={
            cut(key, 100): cut(value, 100)
            for key, value in code_versions.items()
            if isinstance(value, str)
        },
        plan=_plan(_get(entry, "plan")),
        saves_s=number(_get(_get(entry, "seconds"), "saves")),
        state_gib=state_gib(_counts(_get(entry, "state_bytes"))),
    )


def _plan(entry: Any) -> Planned | None:
    try:
        return Planned.model_validate(entry)
    except ValidationError:
        return None


def _goodput(content: Any) -> dict[str, Any]:
    seconds = _get(content, "seconds")
    known = {kind: number(_get(seconds, kind)) for kind in KINDS}
    return {
        "percent": number(_get(content, "percent")),
        "seconds": {k: s for k, s in known.items() if s is not None},
    }


def read_events(path: Path) -> list[dict[str, Any]]:
    """The latest events by time, each with `time`, `kind`, `step` (or None) and `message`.

    Without a file of events, they are the guard's spikes.
    """
    events = _json_objects(path / EVENTS)
    if not events:
        events = [
            {
                "kind": "rewound" if "back_to" in spike else "spike",
                "message": str(spike.get("reason", "")),
                **spike,
            }
            for spike in _json_objects(path / SPIKES)
        ]
    parsed = [
        {
            "time": _time(event.get("time")),
            "kind": cut(str(event.get("kind")), 40),
            "step": _whole(event.get("step")),
            "message": cut(str(event.get("message", "")), _MESSAGE),
        }
        for event in events
    ]
    return sorted(
        (event for event in parsed if event["time"] is not None), key=lambda event: event["time"]
    )


def _json_objects(path: Path) -> list[dict[str, Any]]:
    """The objects in the last `EVENTS_TAIL_BYTES` of a file of JSON lines."""
    try:
        with open_regular(path, links=True) as file:
            size = file.seek(0, 2)
            file.seek(max(size - EVENTS_TAIL_BYTES, 0))
            lines = file.read(EVENTS_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    objects = []
    for line in lines[1 if size > EVENTS_TAIL_BYTES else 0 : -1][-_EVENTS:]:
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                objects.append(content)
    return objects


def _tables(text: str) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError):
        return {}


def _get(content: Any, key: str) -> Any:
    return content.get(key) if isinstance(content, dict) else None


def _list(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _time(value: Any) -> float | None:
    """Seconds since the epoch; None outside the years that calendars can show."""
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < 1e11 else None


def _counts(content: Any) -> dict[str, int]:
    """A table of whole numbers."""
    if not isinstance(content, dict):
        return {}
    counts = {cut(key, 100): _whole(value) for key, value in content.items()}
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
        self._seen: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[Path]:
        for folder in self.folders:
            yield from self._below(folder)

    def _below(self, top: Path) -> Iterator[Path]:
        """The runs in and below `top`. Links are followed; no folder is visited twice."""
        waiting = [str(top)]
        while waiting:
            folder = waiting.pop()
            try:
                status = os.stat(folder)
                if (identity := (status.st_dev, status.st_ino)) in self._seen:
                    continue
                self._seen.add(identity)
                with os.scandir(folder) as entries:
                    is_folder = {entry.name: _is_folder(entry) for entry in entries}
            except OSError as error:
                self.unreadable.append(f"{folder}: {error.strerror or error}")
                continue
            if is_folder.get(RECORD) is False or is_folder.get(METRICS) is False:
                yield Path(folder)
            for name in sorted(is_folder, reverse=True):
                if is_folder[name] and not _INNER.fullmatch(name):
                    waiting.append(os.path.join(folder, name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
