"""One logger for the package. Only the ranks in `LOG_RANK` (default: 0) speak; errors come from every rank."""

import logging
import os
import sys
from typing import Any

logger = logging.getLogger("torchtitan")


def speaks(rank: int) -> bool:
    """Whether `rank` logs: it is in the comma-separated list `LOG_RANK` (default "0")."""
    return str(rank) in os.environ.get("LOG_RANK", "0").replace(" ", "").split(",")


def init_logging(rank: int) -> None:
    """Send the package's log to stdout, prefixed with the rank where several ranks speak."""
    prefix = f"[rank {rank}] " if rank != 0 or "," in os.environ.get("LOG_RANK", "") else ""
    handler = _Stdout()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if speaks(rank) else logging.ERROR)


class _Stdout(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is now: a live progress line replaces it while it runs."""

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, _: Any) -> None: ...
