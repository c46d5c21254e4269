"""Counts of a rank's requests to the job's store, and of files it opens, until its first step."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan.health.rank_dumps import is_library
from torchtitan.utils.distributed_compat import store_of_this_attempt
from torchtitan.utils.torch_compat import replaced

_ELSEWHERE = ("/dev/", "/proc/", "/sys/")
_CODE = (".py", ".pyc", ".so")


class CountingStore(dist.Store):
    """Stands for the store of a job: counts the keys that the main thread sets, adds to or reads.

    A key that this rank has not set has the value of a key of the same kind: `process/0` the value
    that this rank set as `process/5`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys = 0
        self._values: dict[str, bytes] = {}

    def _count(self, keys: int = 1) -> None:
        if _in_main_thread():
            self.keys += keys

    def set(self, key: str, value: bytes | str) -> None:
        self._count()
        self._values[_kind(key)] = value.encode() if isinstance(value, str) else value

    append = set

    def get(self, key: str) -> bytes:
        self._count()
        return self._values.get(_kind(key), b"")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, _: str, amount: int) -> int:
        self._count()
        return amount

    def check(self, keys: Sequence[str]) -> bool:
        self._count(len(keys))
        return False

    def wait(self, keys: Sequence[str], *_: Any) -> None:
        self._count(len(keys))

    def set_timeout(self, _: timedelta) -> None: ...

    def clone(self) -> "CountingStore":
        return self


def _kind(key: str) -> str:
    return key.rpartition("/")[0]


def _in_main_thread() -> bool:
    """Other threads, such as the watch over hangs, use the store and files at random times."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def counting_store(rank: int, world: int) -> Iterator[CountingStore]:
    """Give the rank a store that counts keys, after the requests that a start under torchrun makes
    before there are process groups. Sets the address of the job for the rest of the process.
    """
    store = CountingStore()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    connects = replaced(dist, TCPStore=lambda *_, **__: store)
    with connects, store_of_this_attempt(rank, world, timedelta(seconds=1)):
        pass
    with replaced(distributed_c10d, _get_default_store=lambda: store):
        yield store


def count_files(counts: Callable[[], bool]) -> list[str]:
    """The files that the main thread opens from now on, while `counts()`, in order; without code.

    Libraries that are not in Python open theirs unseen. The process can't stop counting.
    """
    paths: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not _in_main_thread():
            return
        if not isinstance(args[0], str | bytes | os.PathLike) or not counts():
            return
        path = os.fsdecode(args[0])
        if not (path.startswith(_ELSEWHERE) or path.endswith(_CODE) or is_library(path)):
            paths.append(path)

    sys.addaudithook(hook)
    return paths
