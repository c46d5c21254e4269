"""Reads that may fail: retried, and named in warnings and errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
)

from torchtitan.config.sections.data import DataLoader
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger

T = TypeVar("T")


class DataError(ValueError):
    """The contents of a file can't be used; the message names the file and the place."""


_LASTING = (ValueError, TypeError, LookupError, RecursionError, MemoryError)
"""Errors of decoding and of formats, which another attempt would repeat. Those that are also an
OSError, such as a web page in place of JSON, may pass.
"""


@dataclass
class Retry:
    """Retries the reads of one data source, with growing pauses, unless its contents are at
    fault.
    """

    section: str
    """`training`, `validation`, or a table of sources below one of them."""
    source: str
    """The dataset's name or path."""
    options: DataLoader
    doing: str = field(default="opening it", init=False)
    """The read in progress, for the error about a stall."""

    def __call__(
        self,
        what: str,
        read: Callable[[], T],
        reset: Callable[[], None] = lambda: None,
    ) -> T:
        """Return `read()`.

        Args:
            what: names what is read.
            reset: undoes what a failed attempt changed.

        Raises:
            UserError: every attempt failed, or the contents can't be decoded; or `read` raised it.
        """
        self.doing = f"reading {what}"

        def before_attempt(state: RetryCallState) -> None:
            if state.attempt_number > 1:
                reset()

        def warn(state: RetryCallState) -> None:
            assert state.outcome is not None
            cause = first_line(state.outcome.exception())
            self.doing = f"reading {what}, which failed {state.attempt_number} times ({cause})"
            logger.warning(
                f"{self.section}.dataset: {what} of {self.source}: {cause}; trying again"
            )

        attempt = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self.options.retries + 1),
            wait=wait_exponential(multiplier=self.options.retry_pause_seconds),
            before=before_attempt,
            before_sleep=warn,
        )
        try:
            return attempt(read)
        except _LASTING as error:
            raise UserError(
                f"{self.section}.dataset: {what} of {self.source}: {first_line(error)}"
            ) from error
        except RetryError as error:
            last = error.last_attempt
            raise UserError(
                f"{self.section}.dataset: reading failed: {what} of {self.source}: "
                f"{first_line(last.exception())} "
                f"({last.attempt_number} attempts). Repair the source, or raise "
                f"{self.section.split('.')[0]}.dataloader.retries."
            ) from last.exception()


def _may_pass(error: BaseException) -> bool:
    lasting = isinstance(error, _LASTING) and not isinstance(error, OSError)
    return isinstance(error, Exception) and not isinstance(error, UserError) and not lasting


def first_line(error: BaseException | None) -> str:
    """The type of an error and the first line of its message; of a `DataError` the message
    alone.
    """
    text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
