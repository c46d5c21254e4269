"""The package's logger: runs log to stdout and a file for each rank, other commands to stderr.

On stdout the ranks in `LOG_RANK` (default: 0) log everything, and the others only errors. Every
rank logs to its file.
"""

import errno
import json
import logging
import os
import socket
import sys
from collections import deque
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from torchtitan.utils.errors import failure_of
from torchtitan.utils.limits import PENDING_LOG_LINES
from torchtitan.utils.wording import DATE, escaped

logger = logging.getLogger("torchtitan")
logger.setLevel(logging.INFO)  # on all ranks: stdout may show less than the files
EVENT = "event"
"""Attribute of a log record that is an event of the run."""


def event(kind: str, step: int | None = None, **details: Any) -> dict[str, Any]:
    """Marks a line of the log as an event: `logger.info("Saved ...", extra=event("saved", 100))`.

    Args:
        kind: started, resumed, saved, deleted, abandoned, spike, skipped, rewound, stage,
            straggler, unevaluated, preempted, failed or finished.
        details: more keys, whose values JSON can hold.
    """
    return {EVENT: {"kind": kind, "step": step, **details}}


def _logs(rank: int) -> bool:
    """Whether `rank` is in the comma-separated list `LOG_RANK` (default: 0)."""
    return str(rank) in (os.environ.get("LOG_RANK") or "0").replace(" ", "").split(",")


def init_logging(rank: int) -> None:
    """Log to stdout, with the rank as a prefix if several ranks log."""
    prefix = f"[rank {rank}] " if rank != 0 or "," in os.environ.get("LOG_RANK", "") else ""
    form = _Text(f"%(asctime)s {prefix}%(message)s", datefmt=DATE)
    _log_to(_Terminal("stdout", form, rank), _Pending())


def init_command_logging(rank: int) -> None:
    """Log to stderr, because stdout has the output of the command."""
    _log_to(_Terminal("stderr", _WithLevel(), rank))


def _log_to(*handlers: logging.Handler) -> None:
    for earlier in logger.handlers:
        earlier.close()
    logger.handlers[:] = handlers
    logger.propagate = False


def hide_log() -> None:
    """Show only errors from now on, for commands that run the trainer many times."""
    for handler in logger.handlers:
        handler.setLevel(logging.ERROR)


def log_to_file(folder: Path, rank: int, *, as_json: bool, max_megabytes: int, keep: int) -> None:
    """Also log to this rank's file in `folder`, including the lines logged before.

    Does nothing in a program that has not called `init_logging`, and so configures its logs itself.

    Args:
        max_megabytes: size of a file at which it is renamed, and a new one begun.
        keep: number of renamed files to keep.
    """
    pending = next((handler for handler in logger.handlers if isinstance(handler, _Pending)), None)
    if pending is None:
        return
    path = folder / f"rank_{rank}.{'jsonl' if as_json else 'log'}"
    file = _File(path, max_megabytes * 1_000_000, keep)
    file.setFormatter(
        _Json(rank) if as_json else _Text("%(asctime)s %(levelname)s %(message)s", DATE)
    )
    for record in list(pending.records):  # a failure to write adds one
        file.handle(record)
    logger.handlers[logger.handlers.index(pending)] = file


def log_failure(error: BaseException) -> None:
    """Log this rank's failure to its file only; the terminal shows the error once for all ranks."""
    failure = failure_of(error)
    traceback = None if failure.expected else error
    logger.error(failure.message, exc_info=traceback, extra={"only_in_file": True})


class _Terminal(logging.StreamHandler):
    """Writes to the current `sys.stdout` or `sys.stderr`, which a live progress line replaces while
    it is shown.
    """

    def __init__(self, stream: Literal["stdout", "stderr"], form: logging.Formatter, rank: int):
        self._name_of_stream = stream
        super().__init__()
        self.setLevel(logging.INFO if _logs(rank) else logging.ERROR)
        self.setFormatter(form)
        self.addFilter(lambda record: not hasattr(record, "only_in_file"))

    @property
    def stream(self) -> Any:
        return getattr(sys, self._name_of_stream)

    @stream.setter
    def stream(self, _: Any) -> None: ...


class _Text(logging.Formatter):
    """Text without control characters for a terminal that shows the log or its file."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class _WithLevel(_Text):
    """The message, with the prefix `warning: ` or `error: ` of its level."""

    def format(self, record: logging.LogRecord) -> str:
        mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return mark + super().format(record)


class _Pending(logging.Handler):
    """Keeps lines until their file is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=PENDING_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _File(RotatingFileHandler):
    """Appends to a file that is rotated by size. Losing a line is better than losing the run."""

    def __init__(self, path: Path, max_bytes: int, keep: int):
        super().__init__(
            path,
            maxBytes=max_bytes,
            backupCount=keep,
            encoding="utf-8",
            errors="backslashreplace",
            delay=True,
        )
        self._failing = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not os.path.exists(self.baseFilename):
            self._drop_stream()  # deleted: lines would go with it
        super().emit(record)
        self._failing &= self.stream is None

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once on stdout; later lines try again."""
        self._drop_stream()
        if not self._failing:
            self._failing = True
            logger.warning(
                f"can't write {self.baseFilename}: {sys.exception()}. Lines are lost "
                "there until it works"
            )

    def _open(self) -> Any:
        path = Path(self.baseFilename)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo():  # opening it would block
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        torn = False
        with suppress(OSError), path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            torn = before.read(1) != b"\n"
        file = super()._open()
        if torn:  # an earlier process was killed within a line
            file.write("\n")
        return file

    def _drop_stream(self) -> None:
        stream = self.stream
        self.stream = None
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.close()


class _Json(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, rank: int):
        super().__init__()
        self._origin = {"rank": rank, "host": socket.gethostname()}

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            **self._origin,
        }
        fields["message"] = record.getMessage()
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields | getattr(record, EVENT, {}), default=str)
