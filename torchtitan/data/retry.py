"""Reads that may fail: tried again, and named."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torchtitan.config import schema
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger

T = TypeVar("T")


@dataclass
class Retry:
    """Tries each read several times, with growing pauses."""

    key: str
    """Of the configuration: `training.dataset` or `validation.dataset`."""
    source: str
    """The data set's name, or its files."""
    options: schema.DataLoader
    doing: str = field(default="opening it", init=False)
    """What is being read, for whoever waits for it."""

    def __call__(self, what: str, read: Callable[[], T], before_again: Callable[[], None] = lambda: None) -> T:
        """`read()`, until it succeeds.

        Args:
            what: names what is read.
            before_again: undoes what a failed read has changed.

        Raises:
            UserError: it fails every time.
        """
        self.doing = f"reading {what}"
        for attempt in itertools.count(1):
            try:
                return read()
            except UserError:
                raise  # no accident
            except Exception as error:
                cause = f"{type(error).__name__}: {error}".splitlines()[0]
                if attempt > self.options.retries:
                    raise UserError(
                        f"{self.key}: reading failed: {what} of {self.source}: {cause} ({attempt} attempts). Mend the "
                        f"source, or allow more ({self.key.removesuffix('dataset')}dataloader.retries)."
                    ) from error
                self.doing = f"reading {what}, which failed {attempt} times ({cause})"
                logger.warning(f"{self.key}: {what} of {self.source}: {cause}; trying again")
            time.sleep(self.options.retry_pause_seconds * 2 ** (attempt - 1))
            before_again()
        raise AssertionError("unreachable")
