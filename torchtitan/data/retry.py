"""Reads that may fail: retried, and named in warnings and errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from torchtitan.config import schema
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger

T = TypeVar("T")


@dataclass
class Retry:
    """Retries the reads of one data source, with growing pauses."""

    section: str
    """`training` or `validation`."""
    source: str
    """The dataset's name or path."""
    options: schema.DataLoader
    doing: str = field(default="opening it", init=False)
    """The read in progress, for the error about a stall."""

    def __call__(self, what: str, read: Callable[[], T], reset: Callable[[], None] = lambda: None) -> T:
        """Return `read()`.

        Args:
            what: names what is read.
            reset: undoes what a failed attempt changed.

        Raises:
            UserError: every attempt failed; or `read` raised it, which is not retried.
        """
        self.doing = f"reading {what}"

        def before_attempt(state: RetryCallState) -> None:
            if state.attempt_number > 1:
                reset()

        def warn(state: RetryCallState) -> None:
            assert state.outcome is not None
            cause = _first_line(state.outcome.exception())
            self.doing = f"reading {what}, which failed {state.attempt_number} times ({cause})"
            logger.warning(f"{self.section}.dataset: {what} of {self.source}: {cause}; trying again")

        attempt = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, Exception) and not isinstance(error, UserError)),
            stop=stop_after_attempt(self.options.retries + 1),
            wait=wait_exponential(multiplier=self.options.retry_pause_seconds),
            before=before_attempt,
            before_sleep=warn,
        )
        try:
            return attempt(read)
        except RetryError as error:
            last = error.last_attempt
            raise UserError(
                f"{self.section}.dataset: reading failed: {what} of {self.source}: {_first_line(last.exception())} "
                f"({last.attempt_number} attempts). Repair the source, or raise {self.section}.dataloader.retries."
            ) from last.exception()


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
