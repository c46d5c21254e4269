"""Reads that may fail: retried, and named in warnings and errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torchtitan.config.sections.data import DataLoader
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.retry import retry

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
        self, what: str, read: Callable[[], T], reset: Callable[[], None] = lambda: None
    ) -> T:
        """Return `read()`.

        Args:
            what: names what is read.
            reset: undoes what a failed attempt changed.

        Raises:
            UserError: every attempt failed, or the contents can't be decoded; or `read` raised it.
        """
        self.doing = f"reading {what}"

        place = f"{what} of {self.source}"

        def warn(error: Exception, attempt: int, pause: float) -> None:
            cause = first_line(error)
            self.doing = f"reading {what}, which failed {attempt} times ({cause})"
            logger.warning(f"{self.section}.dataset: {place}: {cause}; trying again")
            reset()

        attempts = self.options.retries + 1
        try:
            return retry(
                read,
                attempts=attempts,
                pause=self.options.retry_pause_seconds,
                may_pass=_may_pass,
                failed=warn,
            )
        except UserError:
            raise
        except Exception as error:
            cause = first_line(error)
            if not _may_pass(error):
                raise UserError(f"{self.section}.dataset: {place}: {cause}") from error
            raise UserError(
                f"{self.section}.dataset: reading failed: {place}: {cause} ({attempts} attempts). "
                f"Repair the source, or raise {self.section.split('.')[0]}.dataloader.retries."
            ) from error


def _may_pass(error: Exception) -> bool:
    lasting = isinstance(error, _LASTING) and not isinstance(error, OSError)
    return not isinstance(error, UserError) and not lasting


def first_line(error: BaseException | None) -> str:
    """The type of an error and the first line of its message; of a `DataError` the message
    alone.
    """
    text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
