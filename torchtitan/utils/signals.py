"""Signals, handled at once in a thread, and the request to stop after the current step."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path

from torchtitan.utils.errors import UserError
from torchtitan.utils.process import launcher_reports

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Schedulers send the first two before they reclaim a machine; Ctrl-C sends the third, a terminal
that closes the last.
"""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after a second Ctrl-C."""
AGAIN_SECONDS = 0.5
"""A second Ctrl-C within this time is ignored: wrappers pass it on, and people press it twice."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_actions: dict[int, Callable[[], None]] = {}
_listening: "list[StopRequest]" = []


def announce_stop(number: int) -> None:
    """Print that this process will stop."""
    again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
    print(f"Asked to stop: finishing what is under way{again}", file=sys.stderr, flush=True)


def exit_when_stopped() -> None:
    """Exit with 75 on a stop signal, until another handler is installed: nothing to save yet.

    Also unblocks the signals, which `run_train.sh` blocks while the interpreter starts.
    """
    for number in stop_signals():
        signal.signal(number, lambda *_: os._exit(os.EX_TEMPFAIL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def stop_signals() -> list[signal.Signals]:
    """The stop signals to handle: not SIGINT where a shell ignores it, as in the background, and
    not SIGHUP below nohup.
    """
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def leave_terminal(number: int) -> None:
    """After SIGHUP, discard what is printed to the terminal, which is gone: writing would fail."""
    if number == signal.SIGHUP:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(null, stream)
        os.close(null)


def on_signal(number: int, action: Callable[[], None]) -> None:
    """Run `action` in a thread whenever signal `number` arrives. Call this from the main thread.

    An ordinary handler never runs while the main thread is blocked in a collective or a rendezvous.
    """
    if not _actions:
        receiving, sending = socket.socketpair()
        sending.setblocking(False)
        signal.set_wakeup_fd(sending.detach(), warn_on_full_buffer=False)
        threading.Thread(target=_dispatch, args=(receiving,), name="signals", daemon=True).start()
    _actions[number] = action
    signal.signal(number, lambda *_: None)


def _dispatch(receiving: socket.socket) -> None:
    while numbers := receiving.recv(64):
        for number in numbers:
            if number in _actions:
                _actions[number]()


class Stopped(BaseException):
    """This process was asked to stop, and has nothing to save. No error, so nothing retries."""


def check_stop() -> None:
    """
    Raises:
        Stopped: the process was asked to stop.
    """
    if any(request.requested for request in _listening):
        raise Stopped


class StopRequest:
    """A request by a signal to stop this process."""

    def __init__(
        self,
        leave: Callable[[], object] = lambda: os._exit(os.EX_TEMPFAIL),
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            leave: called at once, not in the main thread, until `defer`.
        """
        self.requested = False
        self.abandon: Callable[[], object] = _abandon
        """Ends the process on a second Ctrl-C; not called in the main thread."""
        self._leave: Callable[[], object] | None = leave
        self._clock = clock
        self._request_time = 0.0

    def listen(self) -> None:
        """Handle the signals from now on."""
        _listening.append(self)
        for number in stop_signals():
            on_signal(number, partial(self.ask, number))

    def defer(self) -> None:
        """Only set `requested` from now on, because there is something to save first."""
        self._leave = None

    def ignore(self) -> None:
        """Ignore further signals: the request has been honored, and the process is exiting."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def ask(self, number: int) -> None:
        """Handle signal `number`: the first is a request, and a later SIGINT ends the process."""
        leave_terminal(number)
        if self._leave is not None:
            self.requested = True
            self._leave()
        elif not self.requested:
            self._request_time = self._clock()
            self.requested = True
            if number == signal.SIGINT or not launcher_reports():
                announce_stop(number)
        elif number == signal.SIGINT and self._clock() - self._request_time >= AGAIN_SECONDS:
            self.abandon()


def _abandon() -> None:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def kill_text(code: int, location: str = "") -> str:
    """A process's negative exit code in words, and where it was, if known."""
    hint = " (by hand, or out of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}{location and f', at {location}'}"


@contextmanager
def helpers_shielded() -> Iterator[None]:
    """Block the stop signals in processes started within.

    A signal to the whole process group must not end the helpers that a rank needs to finish its
    step. `become_stoppable` unblocks the signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_stoppable() -> None:
    """Accept the stop signals again, in a separate process group."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def start_fork_server() -> None:
    """Start the process that starts worker processes.

    Raises:
        UserError: the path of the folder for temporary files is too long.
    """
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise UserError(
            f"can't start worker processes in {get_temp_dir()}: {error}; set TMPDIR to a folder "
            "with a short path"
        ) from error


def end_with_starter() -> None:
    """End this worker process when the process that asked for it ends, even by SIGKILL.

    Its parent is a fork server, which lives as long as its workers do.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None

    def follow() -> None:
        starter.join()
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # has the fork server's socket
        os._exit(1)

    threading.Thread(target=follow, name="starter", daemon=True).start()


def die_with_parent(launcher: str = "") -> None:
    """Make the kernel kill this process when its parent dies, and exit if it has died already
    (Linux only).

    Args:
        launcher: process id of the launcher that started this process or an ancestor of it. Without
            it, only a death during this call is noticed.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
        if launcher.isdigit() and int(launcher) != parent and not _runs(int(launcher)):
            os._exit(1)


def _runs(pid: int) -> bool:
    """Whether a process exists and hasn't ended; a killed process may wait to be collected."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
