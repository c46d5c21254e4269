"""A rank's watch: a thread that notices when nothing moves, and makes every rank write down where
it is.

It must be a thread: a main thread blocked in a collective runs no Python, not even signal handlers.
The files, in
`<job.dump_folder>/<comm.save_traces_folder>/`, are what `health/diagnose.py` reads:

    state-<rank>.json    step, phase, exception, last exchanges of experts' rows, stacks of all
    threads
    rank_<rank>          the Flight Recorder's collectives, also readable by `torchfrtrace`
    diagnosis.txt        the sentence that names the cause

One rank starts it: a rank whose phase and collectives have not changed for most of the time limit,
that received SIGUSR2, or that raised an exception. It asks the other ranks through the store, waits
for their answers and prints the sentence. Nothing is stopped: a hang still ends by the time limit
of its collective.
"""

import atexit
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from signal import SIGUSR2
from typing import Any

import psutil
import torch.distributed as dist

from torchtitan.config.sections.schema import Comm
from torchtitan.health.diagnose import diagnose
from torchtitan.health.flight_recorder import collective_counts, dump_flight_recorder
from torchtitan.health.rank_dumps import STATE, read_case
from torchtitan.parallel.groups import store_of_a_thread
from torchtitan.utils.activity import SAVING, Activity, current, forget_exchanges, last_exchanges
from torchtitan.utils.errors import from_another_rank
from torchtitan.utils.files import write_whole
from torchtitan.utils.signals import on_signal

PATIENCE = 0.75
"""Share of the time limit after which a rank that does not move is investigated."""
SAVE_SECONDS = 1800
"""Time limit of a save in seconds: it waits for disks."""
ANSWER_SECONDS = 10
"""How long to wait for the other ranks' answers."""
DIAGNOSIS = "diagnosis.txt"
_TIMED_OUT = ("Timed out waiting", "collective operation timeout")
_watches = itertools.count()


class Watch:
    """Watches this process until `close`. All ranks create theirs together, after the default
    process group.
    """

    def __init__(self, comm: Comm, dump_folder: str, degrees: dict[str, int]):
        """
        Args:
            degrees: degree of each mesh axis and of ep, by name.
        """
        self.comm = comm
        self.dump_folder = dump_folder
        self.degrees = degrees
        self.folder = Path(dump_folder, comm.save_traces_folder)
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.limit = comm.init_timeout_seconds
        """Time limit of collectives, in seconds."""
        self._asks = 0
        self._lost = False
        self._seen: tuple[Any, float] = (None, 0.0)
        self._hang: Any = None
        """Activity and collectives when a hang was seen."""
        self._hung: Activity | None = None
        """This rank's phase at that time."""
        self._error_known = False
        """Whether a rank has raised an exception; errors that follow from it are not reported."""
        self._store = store_of_a_thread(f"watch-{next(_watches)}")
        self._store.set_timeout(timedelta(seconds=self.limit))  # until all ranks are here
        self._store.set(
            f"process/{self.rank}", json.dumps([os.getpid(), socket.gethostname(), time.time()])
        )
        processes = self._store.multi_get([f"process/{rank}" for rank in range(self.world)])
        self._processes = [json.loads(process) for process in processes]
        self._store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        forget_exchanges()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._signaled = False
        self._closing = False
        on_signal(SIGUSR2, self._on_signal)
        self._thread = threading.Thread(
            target=self._run,
            name="watch",
            daemon=True,
        )
        self._thread.start()
        # A thread that runs C++ code while the interpreter shuts down aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        self._closing = True
        self._wake.set()
        self._thread.join()

    def failed(self, error: BaseException) -> None:
        """Write down this rank's exception and what the other ranks are doing, unless it ends a
        known hang.
        """
        with self._lock:
            if not (_is_consequence(error) and (self._error_known or self._hung is current())):
                self._ask("error", f"{type(error).__name__}: {error}", error)

    def explain(self, error: BaseException) -> str | None:
        """The hang that `error` ended, in a sentence; None if no hang was seen here."""
        with self._lock:  # the sentence may be about to be written
            if self._hung is not current() or not _is_consequence(error):
                return None
        path = self.folder / DIAGNOSIS
        return path.read_text().strip() if path.exists() else None

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
                    self._ask(
                        "hang", f"nothing moved for {time.monotonic() - current().since:.0f} s"
                    )

    @property
    def _patience(self) -> float:
        return PATIENCE * (SAVE_SECONDS if current().activity.startswith(SAVING) else self.limit)

    def _hangs(self) -> bool:
        """Whether phase and collectives have not changed for too long, and this was not reported
        yet.
        """
        waited = time.monotonic() - current().since
        if waited < self._patience / 2:
            return False
        now = current(), collective_counts()
        if now != self._seen[0]:
            self._seen = now, time.monotonic()
        still = time.monotonic() - self._seen[1] > self._patience / 2
        return still and waited > self._patience and now != self._hang

    # ---- asking and answering

    def _on_store(self, operation: Callable[..., Any], *args: Any) -> Any:
        """The result of a store operation; None once the rank that hosts the store is gone."""
        try:
            return None if self._lost else operation(*args)
        except RuntimeError:
            self._lost = True
            return None

    def _ask(self, kind: str, why: str, error: BaseException | None = None) -> None:
        """Write, make the others write, and print the diagnosis; or answer the rank that asked
        first.
        """
        ask = {
            "rank": self.rank,
            "kind": kind,
            "why": why,
            "time": time.time(),
        }
        claim = self._on_store(
            self._store.compare_set, f"ask/{self._asks + 1}", "", json.dumps(ask)
        )
        if claim is None:  # every rank names this same ask, so their files belong together
            self._write(
                {
                    "rank": 0,
                    "kind": "error",
                    "why": "rank 0 is gone",
                    "time": self._processes[0][2],
                },
                error,
            )
            return
        self._asks += 1
        if (first := json.loads(claim)) != ask:
            self._write(first, error)
            return
        with self._reporting_disk_errors():
            (self.folder / DIAGNOSIS).unlink(missing_ok=True)  # from an earlier incident
        self._write(ask, error)
        if silent := self._await_answers():
            with self._reporting_disk_errors():
                self._write_state(ask, error, silent)
        case = read_case(self.folder, self.comm.save_traces_file_prefix, since=ask["time"])
        if case is None:  # writing failed
            return
        sentence = diagnose(case)
        with self._reporting_disk_errors():
            write_whole(self.folder / DIAGNOSIS, f"{sentence}\n".encode())
        if error is None:  # an exception is reported with its traceback
            print(f"rank {self.rank}: {why}: {sentence}", file=sys.stderr, flush=True)

    def _answer(self) -> None:
        while self._on_store(self._store.check, [key := f"ask/{self._asks + 1}"]):
            self._asks += 1
            if asked := self._on_store(self._store.get, key):
                self._write(json.loads(asked), None)

    def _await_answers(self) -> dict[int, str]:
        """Wait for the other ranks; those that gave no answer, with what is known about their
        processes.
        """
        missing = {rank: "" for rank in range(self.world) if rank != self.rank}
        deadline = time.monotonic() + ANSWER_SECONDS
        while missing and not self._lost and time.monotonic() < deadline:
            time.sleep(0.05)
            answers = (
                r
                for r in missing
                if not self._on_store(self._store.check, [f"answer/{self._asks}/{r}"])
            )
            missing = {rank: self._process(rank) for rank in answers}
            if all("is gone" in text for text in missing.values()):
                break
        return missing

    def _process(self, rank: int) -> str:
        """What is known about a rank that gives no answer."""
        pid, host, _ = self._processes[rank]
        name = f"process {pid} on {host}"
        if host != socket.gethostname():
            return f"gave no answer ({name})"
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return f"is gone ({name})"
        if status == psutil.STATUS_ZOMBIE:
            return f"is gone ({name})"
        if status == psutil.STATUS_STOPPED:
            return f"is stopped by a signal ({name}; SIGCONT resumes it)"
        return f"gave no answer ({name}: {status})"

    def _write(self, ask: dict[str, Any], error: BaseException | None) -> None:
        if ask["kind"] == "hang":
            self._hang = (current(), collective_counts())
            self._hung = current()
        self._error_known |= ask["kind"] == "error"
        with self._reporting_disk_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_state(ask, error)
            for stacks in (False, True):  # stacks can take seconds, which we may not have
                dump_flight_recorder(self.comm, self.dump_folder, stacks=stacks)
        if ask["rank"] != self.rank:
            self._on_store(self._store.set, f"answer/{self._asks}/{self.rank}", "")

    @contextmanager
    def _reporting_disk_errors(self) -> Iterator[None]:
        """A full disk must not hide the diagnosis."""
        try:
            yield
        except OSError as error:
            print(
                f"rank {self.rank}: can't write to {self.folder}: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )

    def _write_state(
        self, ask: dict[str, Any], error: BaseException | None, silent: dict[int, str] | None = None
    ) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = {
            names.get(ident, str(ident)): _frames(frame)
            for ident, frame in sys._current_frames().items()
        }
        position = current()
        state = {
            "ask": ask,
            "rank": self.rank,
            "world": self.world,
            "degrees": self.degrees,
            "process": self._processes[self.rank][:2],
            "time": time.time(),
            "phase": position.activity,
            "step": position.step,
            "seconds": round(time.monotonic() - position.since, 1),
            "error": error and _error(error),
            "silent": silent or {},
            "exchanges": [exchange._asdict() for exchange in last_exchanges()],
            "threads": {name: stack for name, stack in frames.items() if name != "watch"},
        }
        write_whole(self.folder / STATE.format(self.rank), json.dumps(state, indent=1).encode())


def _is_consequence(error: BaseException) -> bool:
    return from_another_rank(error) or any(text in str(error) for text in _TIMED_OUT)


def _error(error: BaseException) -> dict[str, Any]:
    frames: list[tuple[str, int, str]] = []
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.insert(0, (code.co_filename, traceback.tb_lineno, code.co_qualname))
        traceback = traceback.tb_next
    text = (str(error).splitlines() or [""])[0][:300]
    return {
        "type": type(error).__name__,
        "text": text,
        "frames": frames,
        "cause": not _is_consequence(error),
    }


def _frames(frame: Any) -> list[tuple[str, int, str]]:
    """A stack, innermost frame first."""
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return frames
