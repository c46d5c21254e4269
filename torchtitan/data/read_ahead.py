"""An iterator that runs in a thread, ahead of its consumer."""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 5.0


class ReadAhead(Generic[T]):
    """Runs `items` in a thread until `depth` of them wait to be taken."""

    def __init__(self, items: Iterator[T], depth: int):
        self._queue: queue.Queue[T | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._produce,
            args=(items,),
            name="data",
            daemon=True,
        )
        self._thread.start()

    def get(self, timeout: float) -> T | None:
        """The next item; None at the end.

        Raises:
            queue.Empty: none came within `timeout` seconds.
            BaseException: what `items` raised.
        """
        item = self._queue.get(timeout=timeout)
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop after the item in progress.

        The wait is limited, as a hanging read never ends; but a thread that runs C++ code while the
        interpreter shuts down aborts the process.
        """
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    def _produce(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: T | BaseException | None) -> bool:
        """Whether `item` was queued before the consumer closed this."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
