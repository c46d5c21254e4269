"""Runs a tracker in a thread, so that it can neither stop nor delay the run."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torchtitan.utils.logging import logger
from torchtitan.utils.wording import cut

MAX_CALLS = 10_000
"""Maximum number of calls that wait for a tracker. When it is exceeded, the oldest are dropped."""
RETRY_SECONDS = 300.0
"""Pause before the next attempt to start a tracker."""
CLOSE_SECONDS = 30.0
"""Time limit of uploads at the end of the run."""


class Background:
    """Calls the methods of a sink in a thread, in order. Only its first failure is a warning.

    If a tracker can't be started, because its service is down, the thread tries again later. Calls
    wait meanwhile.
    """

    def __init__(self, name: str, make: Callable[[], Any]):
        """
        Args:
            name: the sink's name in messages.
            make: creates the sink, in the thread.
        """
        self.name = name
        self.make = make
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MAX_CALLS)
        self._closing = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of the sink, if it has this method."""
        while True:
            try:
                return self._calls.put_nowait((method, arguments))
            except queue.Full:
                self._warn(f"{MAX_CALLS:,} calls wait for it; the oldest are dropped")
                try:
                    self._calls.get_nowait()
                except queue.Empty:
                    continue

    def close(self, reason: str) -> None:
        """Close the sink after the calls made so far. `join` waits for it."""
        self.call("ended", reason)
        self.call("close")
        self._closing.set()

    def join(self, deadline: float) -> None:
        """Wait until the sink is closed, or until `deadline` on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn("it did not take the last records in time", always=True)

    def _run(self) -> None:
        sink = self._build()
        method = ""
        while sink is not None and method != "close":
            method, arguments = self._calls.get()
            try:
                if (call := getattr(sink, method, None)) is not None:
                    call(*arguments)
            except Exception as error:
                self._warn(_short(error))

    def _build(self) -> Any:
        """The sink; None if the run ended before it could be built."""
        while True:
            try:
                return self.make()
            except Exception as error:
                self._warn(f"{_short(error)}; tried again every {RETRY_SECONDS:.0f} s")
            if self._closing.wait(RETRY_SECONDS):
                return None

    def _warn(self, problem: str, *, always: bool = False) -> None:
        if not self._warned or always:
            logger.warning(
                f"metrics.sinks: {self.name}: {problem}. The run continues; metrics.jsonl has "
                "every record"
            )
        self._warned = True


def _short(error: Exception) -> str:
    return cut(" ".join(f"{type(error).__name__}: {error}".split()), 300).rstrip(".: ")
