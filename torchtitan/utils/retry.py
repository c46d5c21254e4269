"""Retries after transient errors, with growing pauses."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_uniform = random.Random().uniform  # leaves the seeded generator alone


def retry(
    action: Callable[[], Result],
    *,
    attempts: int,
    pause: float,
    may_pass: Callable[[Exception], bool],
    failed: Callable[[Exception, int, float], None],
) -> Result:
    """Return `action()`, called again after transient errors. The last error is raised.

    Args:
        pause: mean seconds before the second attempt; doubles each time. A random
            factor from 0.5 to 1.5 separates ranks that failed together.
        may_pass: whether an error is transient.
        failed: called before each pause with the error, the number of attempts so far and the
            seconds to wait.
    """
    attempt = 1
    while True:
        try:
            return action()
        except Exception as error:
            if attempt == attempts or not may_pass(error):
                raise
            seconds = pause * 2 ** (attempt - 1) * _uniform(0.5, 1.5)
            failed(error, attempt, seconds)
        time.sleep(seconds)
        attempt += 1
