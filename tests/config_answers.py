"""The answer to a configuration, in time and of a bounded length."""

import signal
import time
from contextlib import contextmanager

from torchtitan.config import resolve
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import MAX_PROBLEMS, ConfigError

SECONDS = 4
LONGEST_PROBLEM = 1000


class TooSlowError(BaseException):
    """The answer took longer than a test waits for."""


@contextmanager
def answer_in_time(seconds=SECONDS):
    """Fail if the block takes longer; also interrupts what would never end."""

    def interrupt(number, frame):
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(
        signal.ITIMER_REAL, 5 * seconds
    )  # wall clock, on machines that do other things too
    start = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - start < seconds


def answer(argv, world=1):
    """The problems with a configuration; none if it is accepted."""
    with answer_in_time():
        try:
            resolved = resolve(argv, world, check=False)
            preflight(resolved.config, world=world, sources=resolved.sources, output=False)
            return []
        except ConfigError as error:
            problems = error.problems
            shown = str(error).splitlines()
    assert len(shown) <= MAX_PROBLEMS + 1
    assert all(len(problem) <= LONGEST_PROBLEM for problem in problems)
    return problems
