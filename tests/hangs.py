"""A watch over runs that hang on purpose, and the sentence it writes."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

from torchtitan.config.sections.schema import Comm
from torchtitan.health import hang_watch as watching
from torchtitan.health.hang_watch import Watch

HERE = "tests/hangs.py"
"""Where a rank hangs that waits until it is diagnosed."""


@contextmanager
def watched(folder, degrees=None):
    """A watch that loses patience after 5 s, longer than a first step on a busy machine takes, and
    its folder.
    """
    before = watching.PATIENCE, watching.SAVE_SECONDS, watching.ANSWER_SECONDS
    watching.PATIENCE = 0.05
    watching.SAVE_SECONDS = 100
    watching.ANSWER_SECONDS = 3
    watch = Watch(Comm(), str(folder), degrees or {})
    watch.limit = Comm().train_timeout_seconds
    try:
        yield watch
    finally:
        watch.close()
        assert "watch" not in {thread.name for thread in threading.enumerate()}
        watching.PATIENCE, watching.SAVE_SECONDS, watching.ANSWER_SECONDS = before


def until_diagnosed(folder, seconds=30):
    """Wait for the sentence."""
    path = Path(folder, "comm_traces", "diagnosis.txt")
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_text().strip()
