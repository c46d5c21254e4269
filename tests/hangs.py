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
_MARK = "hangs"


@contextmanager
def watched(folder, degrees=None):
    """A watch that loses patience 4 s after a rank has said that the run hangs.

    Until then a step may take as long as it needs on a busy machine.
    """
    before = watching.PATIENCE, watching.SAVE_SECONDS, watching.ANSWER_SECONDS
    watching.PATIENCE = 100.0
    watching.SAVE_SECONDS = 100
    watching.ANSWER_SECONDS = 3
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(Path(folder, _MARK), ended))
    watch = Watch(Comm(), str(folder), degrees or {})
    watch.limit = Comm().train_timeout_seconds
    follower.start()
    try:
        yield watch
    finally:
        ended.set()
        follower.join()
        watch.close()
        assert "watch" not in {thread.name for thread in threading.enumerate()}
        watching.PATIENCE, watching.SAVE_SECONDS, watching.ANSWER_SECONDS = before


def _follow(mark, ended):
    while not mark.exists():
        if ended.wait(0.05):
            return
    watching.PATIENCE = 0.04


def say_that_it_hangs(folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, _MARK).touch()


def until_diagnosed(folder, seconds=50, *, hangs=True):
    """Wait for the sentence.

    Args:
        hangs: say first that the run hangs; False if the watch was told of an error.
    """
    if hangs:
        say_that_it_hangs(folder)
    path = Path(folder, "comm_traces", "diagnosis.txt")
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_text().strip()
