"""The record of a run, `<dump_folder>/run.json`: its starts, their ends, and the time spent.

Every second is charged to one kind; nested time to the innermost phase. Goodput is the share of
`steps`: training whose result is kept.
"""

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli

from torchtitan.utils.activity import Kind, Stopwatch
from torchtitan.utils.assets import CHECKOUT
from torchtitan.utils.errors import failure_of
from torchtitan.utils.files import read_regular
from torchtitan.utils.logging import logger
from torchtitan.utils.run_files import RunFile
from torchtitan.utils.wording import flat, plural, show_duration, show_percent

KINDS = {
    "steps": "steps",
    "first_step": "first step",
    "start": "start-up",
    "restart": "restarts",
    "repeated": "repeated steps",
    "data": "waiting for data",
    "saves": "saves",
    "validation": "validation",
    "other": "other",
}
"""The kinds of time: name in the file to name in the log."""

_MAX_BYTES = 1 << 26
"""Maximum size of a file to read."""
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_Start = dict[str, Any]
"""The file's record of one start."""
HEARTBEAT_SECONDS = 1.0
"""Minimum time between two writes of the file, for short steps."""


def git_revision() -> str | None:
    """The commit of this code, `-dirty` if files have changed; None outside a git repository."""
    if CHECKOUT is None or not (CHECKOUT / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", str(CHECKOUT), *describe]
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two runs' manifests, each as `key old -> new`."""
    out = []
    for section in ("config", "versions", "ranks", "git"):
        old = _flat(section, before.get(section))
        new = _flat(section, now.get(section))
        for key in old | new:
            if old.get(key) != new.get(key):
                out.append(f"{key} {_word(old.get(key))} -> {_word(new.get(key))}")
    return out


def _flat(section: str, value: Any) -> dict[str, Any]:
    """Values by dotted key; the configuration (TOML) and the versions have no prefix."""
    if section == "config" and isinstance(value, str):
        value = tomli.loads(value)
    if not isinstance(value, dict):
        return {section: value}
    return flat(value, "" if section in ("config", "versions") else f"{section}.")


def _word(value: Any) -> str:
    if value is None:
        return "unset"
    return json.dumps(value) if isinstance(value, str | list) else str(value)


class RunRecord:
    """Records one start in the run's file, which rank 0 writes, or a rank that fails."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        step: int,
        resumable: bool,
        writes: bool,
        began: float,
        clock: Callable[[], float] = time.time,
    ):
        """
        Args:
            facts: entries of this start: ranks, layout, hardware, versions, ...
            step: the step resumed from; 0 from scratch.
            resumable: the run saves checkpoints, so a start from scratch may be a second attempt.
            writes: this is rank 0.
            began: start of the process, in seconds since the epoch.
        """
        self.file = RunFile(folder / "run.json")
        self.clock = clock
        self.writes = writes
        self.id = secrets.token_hex(5)
        """The run's id, kept across restarts (rank 0 only)."""
        self.trackers: dict[str, Any] = {}
        """Each tracker's state for the next start, by the tracker's name."""
        self.starts: list[_Start] = self._earlier_starts(step, resumable) if writes else []
        self.furthest = max((start["step"] for start in self.starts), default=0)
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._starting = "start"
        since = began
        if self.starts and self.starts[-1]["end"] != "completed":
            self._starting = "restart"
            since = min(began, self.starts[-1]["last_seen"])
        self._stopwatch = Stopwatch()
        now = clock()
        self.seconds[self._starting] = now - since
        self._first = True
        self._current: _Start = {
            "time": began,
            "resumed_step": step,
            "step": step,
            "last_seen": now,
            "end": None,
            **facts,
            "seconds": self.seconds,
        }
        self.starts.append(self._current)
        if writes:
            self._write(self.starts)

    def _earlier_starts(self, step: int, resumable: bool) -> list[_Start]:
        """The run's earlier starts. The file of another run is set aside, like its metrics."""
        content = self.file.read(_MAX_BYTES)
        if content is None:
            return []
        try:
            run = json.loads(content)
            starts: list[_Start] = run["starts"]
            end = starts[-1]["end"] or "killed"
            starts[-1]["end"] = end
            if step or (resumable and end not in ("completed", "interrupted")):
                if not self._is_copy(run):
                    self._adopt_identity(run)
                return starts
        except _UNREADABLE as error:
            self.file.refuse(str(error))
            return []
        self.file.set_aside()
        return []

    def _is_copy(self, run: Mapping[str, Any]) -> bool:
        """Whether the file is a copy from a run's folder that is still there, so both may go on."""
        original = Path(run.get("folder", ""), self.file.path.name)
        with suppress(OSError, *_UNREADABLE):
            content = json.loads(read_regular(original, _MAX_BYTES, links=True))
            if content["id"] == run["id"] and not original.samefile(self.file.path):
                logger.warning(
                    f"{self.file.path} is a copy of {original}: trackers begin a new run"
                )
                return True
        return False

    # ---- time

    def kind_of(self, step: int) -> Kind:
        """The kind of time that `step` is charged to."""
        if self._first:
            return "first_step"
        return "repeated" if step <= self.furthest else "steps"

    def record_step(self, step: int) -> None:
        """Record that a step has run, even if its update was skipped or rewound."""
        self._first = False
        self.furthest = max(self.furthest, step)

    # ---- the file

    def heartbeat(self, step: int) -> None:
        """Record that `step` is done and the run is alive."""
        self._current["step"] = step
        if self.writes and self.clock() >= self._current["last_seen"] + HEARTBEAT_SECONDS:
            self._write(self.starts)

    def record(self, key: str, value: object) -> None:
        """Add an entry about this start, written with the next heartbeat or at the end."""
        self._current[key] = value

    def end(self, step: int, last_step: int, error: BaseException | None = None) -> str:
        """Record the end of this start; a failure with the message of the rank that caused it.

        Returns:
            The recorded reason; after a failure, other ranks than 0 return their own.
        """
        failure = None if error is None else failure_of(error)
        if failure is None:
            reason = "completed" if step >= last_step else "preempted"
        else:
            reason = failure.end
        starts: list[_Start] = []
        with suppress(OSError, *_UNREADABLE):
            run = json.loads(read_regular(self.file.path, _MAX_BYTES, links=True))
            starts = run["starts"]
        if self.writes:
            if failure is not None and failure.elsewhere and starts:
                reason = starts[-1]["end"] or reason
            self._current |= {"step": step, "end": reason}
            self._write(self.starts)
        elif starts and isinstance(error, Exception) and failure and not failure.elsewhere:
            starts[-1]["end"] = reason
            self._adopt_identity(run)
            self._write(starts)
        self._stopwatch.close()
        return reason

    def goodput(self) -> str:
        """The whole run's time in one line."""
        percent, seconds = _account(self.starts)
        least = 0.001 * sum(seconds.values())
        shares = [f"{KINDS[kind]} {show_duration(s)}" for kind, s in seconds.items() if s >= least]
        starts = plural(len(self.starts), "start")
        return f"Goodput {show_percent(percent)}: {', '.join(shares)}; {starts}"

    def save_trackers(self) -> None:
        """Write the trackers' states at the end of this start."""
        if self.writes and self.trackers:
            self._write(list(self.starts))  # a copy: the clock has stopped

    def shares(self) -> tuple[float, dict[str, float]]:
        """Goodput in percent, and the seconds of each kind, over all starts."""
        return _account(self.starts)

    def _adopt_identity(self, run: Mapping[str, Any]) -> None:
        """Adopt the file's id and trackers, which files of earlier releases lack."""
        self.id = run.get("id", self.id)
        self.trackers = run.get("trackers", {})

    def _write(self, starts: list[_Start]) -> None:
        if starts is self.starts:
            names = {"start": self._starting, "staging": "saves"}
            for kind, spent in self._stopwatch.lap().items():
                self.seconds[names.get(kind, kind)] += spent
            self._current["last_seen"] = self.clock()
        percent, seconds = _account(starts)
        record = {
            "format": 1,
            "id": self.id,
            "folder": os.path.realpath(self.file.path.parent),
            "goodput": {"percent": percent, "seconds": seconds},
            "trackers": self.trackers,
            "starts": starts,
        }
        self.file.replace(json.dumps(record, indent=1))


def _account(starts: Sequence[_Start]) -> tuple[float, dict[str, float]]:
    """Goodput in percent, and the seconds of each kind over all starts."""
    seconds = {kind: sum(start["seconds"][kind] for start in starts) for kind in KINDS}
    return 100 * seconds["steps"] / (sum(seconds.values()) or 1.0), seconds
