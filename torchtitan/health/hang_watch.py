"""A thread that detects when nothing moves, and makes every rank write down where it is.

It must be a thread: a main thread blocked in a collective runs no Python, not even signal handlers.
`health/diagnose.py` reads the files in `<job.dump_folder>/<comm.save_traces_folder>/`:

    state-<rank>.json    step, phase, exception, last exchanges of experts' rows, all stacks
    rank_<rank>          the Flight Recorder's collectives, also readable by `torchfrtrace`
    crash-<rank>.txt     the stacks at a fatal signal
    diagnosis.txt        the sentence that names the cause

One rank starts it: a rank whose phase and collectives have not changed for most of the time limit,
that received SIGUSR2, or that raised an exception. It asks the other ranks through the store, waits
for their answers and prints the sentence. A hang ends by the time limit of its collective. A rank
that neither moves nor fails once another has failed ends itself: NCCL doesn't notice a lost rank.
"""

import atexit
import faulthandler
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from signal import SIGUSR2
from types import FrameType
from typing import IO, Any

import psutil
import torch.distributed as dist

from torchtitan.config.sections.schema import Comm
from torchtitan.health.diagnose import diagnose
from torchtitan.health.flight_recorder import collective_counts, dump_flight_recorder
from torchtitan.health.rank_dumps import CRASH, STATE, read_dumps
from torchtitan.parallel.groups import store_of_a_thread
from torchtitan.utils.activity import SAVING, Activity, current, forget_exchanges, last_exchanges
from torchtitan.utils.errors import HangError, failure_of
from torchtitan.utils.files import write_whole
from torchtitan.utils.signals import on_signal

PATIENCE = 0.75
"""Share of the time limit after which a rank that does not move is investigated."""
SAVE_SECONDS = 1800
"""Time limit of a save in seconds: it waits for disks."""
ANSWER_SECONDS = 10
"""Seconds to wait for the other ranks' answers."""
LAST_SECONDS = 2
"""Seconds in which ranks may end by themselves, or move, after another has failed."""
DIAGNOSIS = "diagnosis.txt"
_Position = tuple[Activity, dict[str, dict[str, int]]]
"""A rank's activity, and its numbers of collectives."""
_watches = itertools.count()


class Watch:
    """Watches this process until `close`. All ranks create it, after the default process group."""

    def __init__(self, comm: Comm, dump_folder: str, degrees: dict[str, int]):
        """
        Args:
            degrees: degree of each mesh axis and of ep, by name.
        """
        self.comm = comm
        self.degrees = degrees
        self.folder = Path(dump_folder, comm.save_traces_folder)
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.limit = comm.init_timeout_seconds
        """Time limit of collectives, in seconds."""
        self._asks = 0
        self._store_is_down = False
        self._last_position: _Position | None = None
        self._position_time = 0.0
        self._hang: _Position | None = None
        """This rank's position when a hang was seen."""
        self._saw_error = False
        """Whether a rank has raised an exception; errors that follow from it are not reported."""
        self._fails = False
        """Whether this rank has raised one, and is about to end."""
        self._store = store_of_a_thread(f"watch-{next(_watches)}")
        self._store.set_timeout(timedelta(seconds=self.limit))  # until rank 0 is here
        self._process = [os.getpid(), socket.gethostname(), time.time()]
        self._store.set(f"process/{self.rank}", json.dumps(self._process))
        self._rank_0_began = json.loads(self._store.get("process/0"))[2]
        self._store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        forget_exchanges()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._signaled = False
        self._closing = False
        on_signal(SIGUSR2, self._on_signal)
        self._crash_file: IO[str] | None = None
        if not faulthandler.is_enabled():  # as by PYTHONFAULTHANDLER
            with self._reporting_disk_errors():
                self._crash_file = (self.folder / CRASH.format(self.rank)).open("w")
                faulthandler.enable(self._crash_file)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        # A thread that runs C++ code while the interpreter shuts down aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread."""
        if self._crash_file is not None:
            faulthandler.disable()
            Path(self._crash_file.name).unlink(missing_ok=True)
            self._crash_file.close()
            self._crash_file = None
        atexit.unregister(self.close)
        self._closing = True
        self._wake.set()
        self._thread.join()

    def failed(self, error: BaseException) -> None:
        """Write down the exception and what the other ranks do, unless this ends a known hang."""
        self._fails = True
        with self._lock:
            is_cause = failure_of(error).is_cause and not isinstance(error, HangError)
            if is_cause or not (self._saw_error or self._is_hung()):
                self._ask("error", f"{type(error).__name__}: {error}", error)

    def explain(self, error: BaseException) -> str | None:
        """The hang that `error` ended, in a sentence; None if no hang was seen here."""
        with self._lock:  # the sentence may be about to be written
            if not self._is_hung() or failure_of(error).is_cause:
                return None
        path = self.folder / DIAGNOSIS
        return path.read_text().strip() if path.exists() else None

    def give_up(self) -> None:
        """Make ranks that don't move end themselves, because this one fails."""
        with self._lock:
            self._on_store(self._store.set, "over", "")

    def _is_hung(self) -> bool:
        return self._hang is not None and self._hang[0] is current()

    # ---- the thread

    def _on_signal(self) -> None:
        self._signaled = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(min(1.0, self._patience / 10))
            self._wake.clear()
            with self._lock:
                self._answer()
                if self._signaled:
                    self._signaled = False
                    self._ask("signal", "SIGUSR2")
                elif self._hangs():
                    idle_seconds = time.monotonic() - current().since
                    self._ask("hang", f"nothing moved for {idle_seconds:.0f} s")
                position = current()
                waits = (self._saw_error or self._is_hung()) and not self._fails
                over = waits and (self._has("over") or self._store_is_down)
            if over:
                time.sleep(LAST_SECONDS)
                if current() is position and not self._fails:
                    text = f"rank {self.rank}: ended, because another rank failed"
                    print(text, file=sys.stderr, flush=True)
                    os._exit(1)

    @property
    def _patience(self) -> float:
        saves = current().activity.startswith(SAVING)
        return PATIENCE * (SAVE_SECONDS if saves else self.limit)

    def _hangs(self) -> bool:
        """Whether a hang is to be reported: phase and collectives have not changed for too long."""
        idle_seconds = time.monotonic() - current().since
        if idle_seconds < self._patience / 2:
            return False
        now = current(), collective_counts()
        if now != self._last_position:
            self._last_position = now
            self._position_time = time.monotonic()
        is_still = time.monotonic() - self._position_time > self._patience / 2
        return is_still and idle_seconds > self._patience and now != self._hang

    # ---- asking and answering

    def _on_store(self, operation: Callable[..., Any], *args: Any) -> Any:
        """The result of a store operation; None once the rank that hosts the store is gone."""
        try:
            return None if self._store_is_down else operation(*args)
        except RuntimeError as error:  # without an answer in time, it may only be busy
            self._store_is_down = isinstance(error, dist.DistNetworkError)
            return None

    def _ask(self, kind: str, why: str, error: BaseException | None = None) -> None:
        """Write, make the others write, and print the diagnosis; or answer an earlier ask."""
        ask = {"rank": self.rank, "kind": kind, "why": why, "time": time.time()}
        key = f"ask/{self._asks + 1}"
        claim = self._on_store(self._store.compare_set, key, "", json.dumps(ask))
        if claim is None:  # every rank names this same ask, so their files belong together
            common_ask = {"rank": 0, "kind": "error", "why": "rank 0 is gone"}
            self._write(common_ask | {"time": self._rank_0_began}, error)
            return
        self._asks += 1
        first = json.loads(claim)
        if first != ask:
            self._write(first, error)
            return
        with self._reporting_disk_errors():
            (self.folder / DIAGNOSIS).unlink(missing_ok=True)  # from an earlier incident
        self._write(ask, error)
        silent = self._await_answers()
        if silent:
            with self._reporting_disk_errors():
                self._write_state(ask, error, silent)
        dumps = read_dumps(self.folder, self.comm.save_traces_file_prefix, since=ask["time"])
        if dumps is None:  # writing failed
            return
        sentence = diagnose(dumps)
        with self._reporting_disk_errors():
            write_whole(self.folder / DIAGNOSIS, f"{sentence}\n".encode())
        if error is None:  # an exception is reported with its traceback
            print(f"rank {self.rank}: {why}: {sentence}", file=sys.stderr, flush=True)

    def _answer(self) -> None:
        while self._has(f"ask/{self._asks + 1}"):
            self._asks += 1
            ask = self._on_store(self._store.get, f"ask/{self._asks}")
            if ask:
                self._write(json.loads(ask), None)

    def _has(self, key: str) -> bool:
        return bool(self._on_store(self._store.check, [key]))

    def _await_answers(self) -> dict[int, str]:
        """Wait for the other ranks; the ranks without an answer, each with its process's state."""
        silent_ranks = {rank: "" for rank in range(self.world) if rank != self.rank}
        deadline = time.monotonic() + ANSWER_SECONDS
        while silent_ranks and not self._store_is_down and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = [rank for rank in silent_ranks if not self._has(f"answer/{self._asks}/{rank}")]
            silent_ranks = {rank: self._without_answer(rank) for rank in silent}
            if all("is gone" in text for text in silent_ranks.values()):
                break
        return silent_ranks

    def _without_answer(self, rank: int) -> str:
        """A description of a rank that gives no answer."""
        key = f"process/{rank}"
        if not (self._has(key) and (process := self._on_store(self._store.get, key))):
            return "gave no answer"
        pid, host, _ = json.loads(process)
        name = f"process {pid} on {host}"
        if host != socket.gethostname():
            return f"gave no answer ({name})"
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_ZOMBIE
        if status == psutil.STATUS_ZOMBIE:
            return f"is gone ({name})"
        if status == psutil.STATUS_STOPPED:
            return f"is stopped by a signal ({name}; SIGCONT resumes it)"
        return f"gave no answer ({name}: {status})"

    def _write(self, ask: dict[str, Any], error: BaseException | None) -> None:
        if ask["kind"] == "hang":
            self._hang = current(), collective_counts()
        self._saw_error |= ask["kind"] == "error"
        name = f"{self.comm.save_traces_file_prefix}{self.rank}"
        with self._reporting_disk_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_state(ask, error)
            for stacks in (False, True):  # stacks can need seconds, which we may not have
                dump_flight_recorder(self.folder / name, stacks=stacks)
        if ask["rank"] != self.rank:
            self._on_store(self._store.set, f"answer/{self._asks}/{self.rank}", "")

    @contextmanager
    def _reporting_disk_errors(self) -> Iterator[None]:
        """A full disk must not hide the diagnosis."""
        try:
            yield
        except OSError as error:
            text = f"rank {self.rank}: can't write to {self.folder}: {error.strerror}"
            print(text, file=sys.stderr, flush=True)

    def _write_state(
        self, ask: dict[str, Any], error: BaseException | None, silent: dict[int, str] | None = None
    ) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads = {}
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, str(ident))
            if name != "watch":
                threads[name] = _frames(traceback.walk_stack(frame))
        position = current()
        state = {
            "ask": ask,
            "rank": self.rank,
            "world": self.world,
            "degrees": self.degrees,
            "process": self._process[:2],
            "time": time.time(),
            "phase": position.activity,
            "step": position.step,
            "seconds": round(time.monotonic() - position.since, 1),
            "error": error and _error(error),
            "silent": silent or {},
            "exchanges": [exchange._asdict() for exchange in last_exchanges()],
            "threads": threads,
        }
        write_whole(self.folder / STATE.format(self.rank), json.dumps(state, indent=1).encode())


def _error(error: BaseException) -> dict[str, Any]:
    failure = failure_of(error)
    frames: list[tuple[str, int, str]] = []
    cause: BaseException | None = error
    while cause is not None:
        frames = _frames(traceback.walk_tb(cause.__traceback__))[::-1] + frames
        cause = cause.__cause__
    return {
        "type": failure.kind,
        "text": failure.headline[:300],
        "frames": frames,
        "cause": failure.is_cause,
        "on_all_ranks": getattr(error, "on_all_ranks", False),
    }


def _frames(frames: Iterator[tuple[FrameType, int]]) -> list[tuple[str, int, str]]:
    """File, line and function of each frame."""
    return [(f.f_code.co_filename, line, f.f_code.co_qualname) for f, line in frames]
