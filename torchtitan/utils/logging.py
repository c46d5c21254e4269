"""The package's logger. Only ranks listed in `LOG_RANK` (default: 0) log; errors are logged on every rank."""

import logging
import os
import sys
from typing import Any

logger = logging.getLogger("torchtitan")
logger.setLevel(logging.INFO)  # on all ranks: events are recorded even where standard output shows nothing
EVENT = "event"
"""Attribute of a log record that is an event of the run."""


def event(kind: str, step: int | None = None, **details: Any) -> dict[str, Any]:
    """Mark a line of the log as an event: `logger.info("Saved /x/step-100", extra=event("saved", 100))`.

    Args:
        kind: started, resumed, saved, deleted, spike, skipped, rewound, stage, straggler, preempted, failed, finished.
        details: more keys, whose values JSON can hold.
    """
    return {EVENT: {"kind": kind, "step": step, **details}}


def _logs(rank: int) -> bool:
    """Whether `rank` is in the comma-separated list `LOG_RANK` (default: 0)."""
    return str(rank) in (os.environ.get("LOG_RANK") or "0").replace(" ", "").split(",")


def init_logging(rank: int) -> None:
    """Log to stdout, with the rank as a prefix if several ranks log."""
    prefix = f"[rank {rank}] " if rank != 0 or "," in os.environ.get("LOG_RANK", "") else ""
    handler = _Stdout()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    handler.setLevel(logging.INFO if _logs(rank) else logging.ERROR)
    logger.handlers[:] = [handler]
    logger.propagate = False


class _Stdout(logging.StreamHandler):
    """Writes to the current `sys.stdout`, which a live progress line replaces while it is shown."""

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, _: Any) -> None: ...
