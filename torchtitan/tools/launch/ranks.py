"""The launcher's control of this node's ranks: stopping, waiting, exit statuses."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import psutil

from torchtitan.utils.signals import (
    AGAIN_SECONDS,
    INTERRUPTED,
    STOP_SIGNALS,
    announce_stop,
    leave_terminal,
    stop_signals,
)

SECRET_ENV = "RDZV_SECRET"
"""Environment variable of the secret that several nodes share; as an option, every user of the
machine could see it.
"""
ELASTIC_RESTARTS = 10
"""Default number of restarts of a run whose number of nodes varies."""
_REPORT_SECONDS = 5.0
"""Time for ranks to report lost steps after a second Ctrl-C."""


class StopHandler:
    """Handles signals that ask to stop; unlike torchrun, never kills the ranks after 30 seconds."""

    def __init__(self, grace: float):
        self.grace = grace
        self.running = False
        """Whether torchrun has been started."""
        self.requested = False
        self.since = 0.0
        """Time of the first signal, by `time.monotonic`."""
        self.statuses: list[int] = []
        """Exit statuses of the ranks; a signal is a negative number."""
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        leave_terminal(number)
        if self.requested:
            if number == signal.SIGINT and time.monotonic() - self.since >= AGAIN_SECONDS:
                self._end_at_once()
            return
        self.requested = True
        self.since = time.monotonic()
        if not self.running:
            os._exit(os.EX_TEMPFAIL)  # an exception could get lost in an import of torch
        announce_stop(number)
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self._stop_ranks()
        # As torchrun's own handler does: this node leaves the rendezvous, which stays open to the
        # others.
        raise SignalException("asked to stop", signal.Signals(number))

    def _stop_ranks(self) -> None:
        """Ask the ranks of this node to save and exit, and wait until they have."""
        ranks = _signal_ranks(signal.SIGTERM)
        for rank, exit_status in _wait(ranks, self.grace):
            if exit_status is None:
                print(
                    f"error: killed a rank that did not save within --grace {self.grace:g} s",
                    file=sys.stderr,
                )
                rank.kill()
                exit_status = -signal.SIGKILL
            self.statuses.append(exit_status)

    def _end_at_once(self) -> None:
        """End the ranks without a save; rank 0 reports the lost steps."""
        ranks = _signal_ranks(signal.SIGINT)
        statuses = [exit_status for _, exit_status in _wait(ranks, _REPORT_SECONDS)]
        if statuses and set(statuses) <= {os.EX_TEMPFAIL}:  # they have saved meanwhile
            os._exit(os.EX_TEMPFAIL)
        if INTERRUPTED not in statuses:
            print("interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # the kernel kills ranks that are left

    def status(self) -> int:
        """Exit status of this process, once torchrun has returned."""
        if self.statuses and not any(self.statuses):
            return 0
        status = common_status(self.statuses)
        if status != os.EX_TEMPFAIL:
            print(
                f"error: when asked to stop, the ranks exited with {self.statuses} instead of 75",
                file=sys.stderr,
            )
        return status


def _signal_ranks(number: signal.Signals) -> list[psutil.Process]:
    """Send a signal to the ranks of this node, and return them."""
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            rank.send_signal(number)
    return ranks


def _wait(
    ranks: Sequence[psutil.Process], seconds: float
) -> Iterator[tuple[psutil.Process, int | None]]:
    """The ranks and their exit statuses as they end; None for one still running at the deadline."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        while (exit_status := _exit_status(rank.pid)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        yield rank, exit_status


def _exit_status(pid: int) -> int | None:
    """A child's exit status, left for torchrun to collect; None while it runs."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def common_status(statuses: list[int]) -> int:
    """75 if every rank saved, or was stopped before it installed its handlers; else 1."""
    return (
        os.EX_TEMPFAIL
        if set(statuses) <= {0, os.EX_TEMPFAIL, *(-number for number in STOP_SIGNALS)}
        else 1
    )
