"""Progress of a command that reads a known number of bytes."""

import sys
import time

from torchtitan.utils.process import unescaped
from torchtitan.utils.wording import show_duration

_REPORT_SECONDS = 30.0


class Meter:
    """Shows progress and remaining time: a bar on a terminal, else a line every half minute."""

    def __init__(self, size: int):
        """
        Args:
            size: bytes of all files.
        """
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        console = Console(file=unescaped(sys.stdout))
        self.bar = Progress(*columns, console=console, disable=not sys.stdout.isatty())
        self._task = self.bar.add_task("", total=size)
        self._size = size
        self._read = 0
        self._start = self._reported = time.monotonic()

    def advance(self, size: int) -> None:
        """Count `size` bytes as read."""
        self._read += size

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return max(time.monotonic() - self._start, 1e-9)

    def show(self, what: str) -> None:
        """Show progress, and `what` beside it."""
        self.bar.update(self._task, completed=self._read, description=what)
        now = time.monotonic()
        if self.bar.disable and self._read and now - self._reported > _REPORT_SECONDS:
            self._reported = now
            eta = (self._size - self._read) * self.seconds / self._read
            share = self._read / self._size
            print(f"{share:.1%} read, {what}, {show_duration(eta)} left", flush=True)
