"""Many runs on this machine, one after the other."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torchtitan.utils.signals import INTERRUPTED
from torchtitan.utils.text import plural


class _Stop:
    """Passes signals that ask to stop on to the current run, which saves; none follows."""

    def __init__(self) -> None:
        self.requested = False
        self.run: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGINT, self._interrupted)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.requested = True
        if self.run:
            self.run.send_signal(number)

    def _interrupted(self, number: int, _: FrameType | None) -> None:
        self.requested = True  # Ctrl-C reaches the run, too


def run_in_turn(names: Sequence[str], commands: Sequence[Sequence[str]], folder: Path) -> int:
    """Run `torchtitan` with each command. One that fails doesn't stop the others.

    Args:
        folder: of all runs, for the last line.

    Returns:
        75 if asked to stop, 130 after a second Ctrl-C, 1 if a run failed, else 0.
    """
    stop = _Stop()
    failed = []
    for i, (name, words) in enumerate(zip(names, commands, strict=True), 1):
        print(f"\n== run {i} of {len(names)}: {name}", file=sys.stderr, flush=True)
        stop.run = subprocess.Popen([sys.executable, "-m", "torchtitan", *words])
        status = stop.run.wait()
        if status == INTERRUPTED:
            print(
                f"Interrupted in run {i} of {len(names)}; the same command resumes", file=sys.stderr
            )
            return INTERRUPTED
        if stop.requested or status == os.EX_TEMPFAIL:
            print(f"Stopped in run {i} of {len(names)}; the same command resumes", file=sys.stderr)
            return os.EX_TEMPFAIL
        if status:
            failed.append(f"{name} (status {status})")
    print(
        f"\n{plural(len(names), 'run')} done: `torchtitan runs {folder}` lists them",
        file=sys.stderr,
    )
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
