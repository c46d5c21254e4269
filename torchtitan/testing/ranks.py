"""Gloo ranks on this machine, forked from a server that has already imported torch: for tests
and parity.

A pool keeps its ranks between tasks; a task is a module-level function that every rank calls. After
a failure or time-out the ranks are killed, and the next task forks new ones in well under a second.
"""

import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from torchtitan.utils.errors import from_another_rank
from torchtitan.utils.signals import end_with_starter

MAX_THREADS = 150
"""Threads of a rank from which on the pool is restarted: each layout adds gloo threads, which poll
continuously.
"""

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torchtitan.testing.ranks_preload"])


class RankFailure(AssertionError):
    """A rank failed or hung; the message holds its traceback or stack."""


def _rank_main(rank: int, world: int, folder: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from torchtitan.utils.distributed_compat import run_gloo_in_order

    end_with_starter()
    run_gloo_in_order()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    stacks = Path(folder, f"stack-{rank}").open("w+")  # noqa: SIM115 - stays open
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world
    )
    frozen_modules = set(sys.modules)
    while True:
        try:
            module, name, args, kwargs, timeout = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(timeout, file=stacks)
        try:
            function = getattr(importlib.import_module(module), name)
            if set(sys.modules) - frozen_modules:  # new imports also stay
                frozen_modules |= set(sys.modules)
                gc.collect()
                gc.freeze()
            result = ("ok", function(*args, **kwargs))
            dist.barrier()
        except BaseException:
            result = ("error", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        try:
            connection.send((*result, psutil.Process().num_threads()))
        except BrokenPipeError:
            return  # another rank failed, and the pool was closed


class RankPool:
    """`world` ranks that run tasks one at a time."""

    def __init__(self, world: int):
        self.world = world
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

        self.folder = ""

    def start(self) -> None:
        self.folder = tempfile.mkdtemp(
            prefix="ranks-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        )
        for rank in range(self.world):
            ours, theirs = mp.Pipe()
            process = _context.Process(
                target=_rank_main, args=(rank, self.world, self.folder, theirs), daemon=False
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank.

        Args:
            timeout: in seconds.

        Returns:
            Their results, in order of rank.

        Raises:
            RankFailure: a rank failed, or didn't return in time.
        """
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send((function.__module__, function.__name__, args, kwargs, timeout))
        results: dict[int, tuple[str, Any]] = {}
        threads = 0
        deadline = time.monotonic() + timeout + 2
        while len(results) < self.world and (remaining := deadline - time.monotonic()) > 0:
            for ready in wait(
                [c for r, c in enumerate(self.connections) if r not in results], remaining
            ):
                rank = next(r for r, c in enumerate(self.connections) if c is ready)
                try:
                    kind, value, count = self.connections[rank].recv()
                    results[rank], threads = (kind, value), max(threads, count)
                except EOFError:
                    self.processes[rank].join(1)
                    status = self.processes[rank].exitcode
                    results[rank] = ("error", f"the process died (exit status {status})")
                if results[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + 3)  # the others depend on it
        errors = {rank: text for rank, (kind, text) in sorted(results.items()) if kind == "error"}
        if errors or len(results) < self.world:
            stacks = {
                r: Path(self.folder, f"stack-{r}").read_text()
                for r in range(self.world)
                if r not in results
            }
            self.close()
            primary = {r: e for r, e in errors.items() if not from_another_rank(e)} or errors
            for rank, text in primary.items():
                raise RankFailure(f"rank {rank} of {self.world} failed:\n{text}")
            raise RankFailure(
                "no answer in time:\n" + "\n".join(f"rank {r}:\n{s}" for r, s in stacks.items())
            )
        if threads > MAX_THREADS:
            self.close()
        return [results[rank][1] for rank in range(self.world)]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes = []
        self.connections = []
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""
