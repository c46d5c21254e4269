"""Our error comes last under plain torchrun, which prints dozens of lines of its own after a
failure.

torchrun's report names the error as the root cause, as it finds it in the rank's error file. And a
small process waits until torchrun has ended, and prints the error again. `torchtitan train` needs
neither: it reports errors itself.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

REPORTER_ENV = "TORCHTITAN_REPORTER"
"""Process id of a launcher that reports the errors of its ranks itself."""
_GIVE_WAY_SECONDS = 10
"""How long a rank that doesn't report an error waits for the one that does. torchrun ends all ranks
at the first exit, and the waiting ones with it.
"""
_PATIENCE_SECONDS = 300
"""How long torchrun may take to end: it gives the other ranks 30 seconds."""


def launcher_reports() -> bool:
    """Whether the process that started this rank is a launcher that reports its errors."""
    return os.environ.get(REPORTER_ENV) == str(os.getppid())


def tell_torchrun(message: str, *, repeat: bool) -> None:
    """Tell the torchrun that started this rank, if one did, why the rank fails.

    Args:
        repeat: also print `message` to torchrun's standard error after its end, unless it will
        restart the ranks. Only
            one rank of a node gets to do that. Without it, another rank reports, and this one lets
            it go first.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    agent = os.getppid()
    if not path or launcher_reports():
        return
    about = {
        "py_callstack": message,
        "timestamp": str(int(time.time())),
    }  # as torch's own handler writes it
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": about}}))
    if not repeat:
        time.sleep(_GIVE_WAY_SECONDS)
        return
    is_last = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get(
        "TORCHELASTIC_MAX_RESTARTS"
    )
    if is_last and hasattr(os, "pidfd_open"):
        with suppress(OSError):
            _print_after(agent, message)


def _print_after(process: int, message: str) -> None:
    """Leave a process behind that prints `message` once `process` has ended."""
    alone = socket.socket(socket.AF_UNIX)
    alone.bind(
        f"\0torchtitan error of {process}"
    )  # fails if another rank was first; the name lasts as long as we do
    ends = os.pidfd_open(process)
    try:
        # Where torchrun writes; the own output may go to a file.
        output = os.open(f"/proc/{process}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    except OSError:  # a socket, say
        output = os.dup(2)
    waiter = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(ends)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        pass_fds=(ends, alone.fileno()),
        start_new_session=True,  # torchrun signals the process groups of its ranks
    )
    assert waiter.stdin is not None
    waiter.stdin.write(message.encode(errors="backslashreplace") + b"\n")
    waiter.stdin.close()


def _wait_and_print(ends: int) -> None:
    """
    Args:
        ends: file descriptor of a process.
    """
    signal.alarm(2 * _PATIENCE_SECONDS)  # nobody may read the output
    message = sys.stdin.buffer.read()
    ended = select.poll()
    ended.register(ends, select.POLLIN)
    if ended.poll(1000 * _PATIENCE_SECONDS):
        os.write(1, message)


if __name__ == "__main__":
    _wait_and_print(int(sys.argv[1]))
