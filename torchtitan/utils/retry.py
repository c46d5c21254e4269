"""The one way to try again: after errors that may pass, with growing pauses."""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def retry(
    action: Callable[[], Result],
    *,
    attempts: int,
    pause: float,
    may_pass: Callable[[Exception], bool],
    failed: Callable[[Exception, int, float], None] | None = None,
    spread: bool = False,
) -> Result:
    """Return `action()`, called again after errors that may pass. The last error is raised.

    Args:
        pause: seconds before the second attempt; doubles each time.
        failed: called before each pause with the error, the number of attempts made and the seconds
        to wait.
        spread: wait 0.5 to 1.5 times as long; ranks that failed together try again at different
        times.
    """
    try:
        return action()
    except Exception as error:
        if attempts == 1 or not may_pass(error):
            raise
        unseen = [error]

    def attempt() -> Result:
        if unseen:
            raise unseen.pop()
        return action()

    # Only after an error: it imports asyncio, and takes longer than reading a row.
    import tenacity

    def before_sleep(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        if failed is not None and isinstance(error, Exception):
            failed(error, state.attempt_number, state.upcoming_sleep)

    wait: tenacity.wait.wait_base = tenacity.wait_exponential(multiplier=pause)
    if spread:
        shortest = tenacity.wait_exponential(multiplier=pause / 2)
        wait = shortest + tenacity.wait_random_exponential(multiplier=pause)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, Exception) and may_pass(e)),
        stop=tenacity.stop_after_attempt(attempts),
        wait=wait,
        before_sleep=before_sleep,
        reraise=True,
    )
    return retrying(attempt)
