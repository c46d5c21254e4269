"""Signals: acted upon at once, and a request to stop that training honors between two steps."""

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take a machine away."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_actions: dict[int, Callable[[], None]] = {}


def on_signal(number: int, action: Callable[[], None]) -> None:
    """Let a thread run `action` whenever this process receives signal `number`.

    Python runs an ordinary handler between two operations of the main thread: never, while that is blocked in a
    collective or a rendezvous. To be called from the main thread.
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


class StopRequest:
    """Whether SIGTERM or SIGUSR1 has asked this process to stop."""

    def __init__(self, leave: Callable[[], object] = lambda: os._exit(os.EX_TEMPFAIL)):
        """
        Args:
            leave: what to do at once, in another thread than the main one, as long as there is nothing to save.
        """
        self.requested = False
        self._leave: Callable[[], object] | None = leave

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            on_signal(number, self._ask)

    def defer(self) -> None:
        """From now on only remember the request: whoever called looks at `requested`."""
        self._leave = None

    def ignore(self) -> None:
        """The request has been honored; another must not disturb the way out."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _ask(self) -> None:
        self.requested = True
        if self._leave is not None:
            self._leave()


@contextmanager
def helpers_shielded() -> Iterator[None]:
    """Processes started within don't get the signals that ask to stop, which are often sent to all at once: a rank
    needs its helpers to finish the step. One that is to be stopped by such a signal calls `become_stoppable`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_stoppable() -> None:
    """Heed SIGTERM and SIGUSR1 again, but only those sent to this very process, not to its group."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that none trains on as an orphan (Linux only)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
