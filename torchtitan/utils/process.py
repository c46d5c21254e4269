"""The start and the end of a process: the launcher's settings, and the report of a failure.

Imports no torch.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from torchtitan.utils.errors import (
    DEBUG_ENV,
    ConfigError,
    UserError,
    error_text,
    failure_of,
    report,
)
from torchtitan.utils.wording import escaped

REPORTER_ENV = "TORCHTITAN_REPORTER"
"""Process id of a launcher that reports the errors of its ranks itself."""
CONNECTED_RANKS = 64
"""Largest world in which gloo connects all pairs of a group at once. In larger worlds pairs connect
when they first communicate; otherwise n ranks make n^2 requests to the job's store, and each has
n - 1 connections.
"""
_GIVE_WAY_SECONDS = 10
"""Seconds that a rank waits for the rank that reports their common error, because torchrun ends all
ranks at the first exit.
"""


_STARTERS = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("an operator of pods", "PET_NNODES", "PET_NODE_RANK"),
)
"""Programs that start several tasks, and variables with their number and each one's rank."""


def _starters() -> Iterator[tuple[str, str, str]]:
    """Possible starters of this process, as in `_STARTERS`, the innermost first."""
    environ = os.environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        yield "torchrun or an operator of pods", "WORLD_SIZE", "RANK"
        return
    yield from _STARTERS
    if "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID") == "0":
        return  # an interactive shell of srun, whose other tasks have ended
    # Only srun sets the first, and numbers its tasks. A shell of salloc isn't numbered, and the
    # script of a batch job is one process, even if the job has several tasks.
    if "SLURM_STEP_NUM_TASKS" in environ:
        yield "srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
    elif "SLURM_PROCID" in environ and environ.get("ENVIRONMENT") != "BATCH":
        yield "srun", "SLURM_NTASKS", "SLURM_PROCID"
    yield "mpirun", "PMI_SIZE", "PMI_RANK"


def _starter() -> tuple[str, str, str] | None:
    """What has started this process and others; None if it is alone."""
    for starter in _starters():
        count = os.environ.get(starter[1], "").rpartition(":")[2]  # of MIN:MAX
        if _is_number(count) and int(count) > 1:
            return starter
    return None


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun sets them; (0, 1) without it.

    Raises:
        ConfigError: they aren't such numbers, or this process is one of several without a rank.
    """
    rank = os.environ.get("RANK", "0")
    world = os.environ.get("WORLD_SIZE", "1")
    if not (_is_number(rank) and _is_number(world) and int(rank) < int(world)):
        got = f"RANK={rank[:20]!r} and WORLD_SIZE={world[:20]!r}"
        raise ConfigError([f"{got}: torchrun sets them to numbers; unset them without it"])
    if int(world) == 1:
        refuse_several_tasks()
    return int(rank), int(world)


def refuse_several_tasks() -> None:
    """Refuse to be one of several processes: each would do all of the work, in the same folder.

    Raises:
        ConfigError: several of these processes have been started.
    """
    starter = _starter()
    if starter is None:
        return
    name, count_key, rank_key = starter
    count = os.environ[count_key]
    address, port = (os.environ.get(f"MASTER_{key}", key) for key in ("ADDR", "PORT"))
    as_rank = "train as this rank by `python -m torchtitan.train --config FILE`, or "
    raise ConfigError(
        [
            f"{name} has started {count} tasks ({count_key}), and each would do all of the work "
            "alone, in the same folder. Run it once. To train, "
            f"{as_rank if rank_key == 'RANK' else ''}start one launcher per node (with srun, "
            "`--ntasks-per-node=1`): `torchtitan train CONFIG --nproc-per-node N`, on several "
            f"nodes with RDZV_SECRET and `--nnodes {count if 'operator' in name else 'NODES'} "
            f"--rdzv-endpoint {address}:{port}`, as in a job of `torchtitan submit`. If this "
            f"process is the only one, start it by `env -u {count_key} -u {rank_key}`"
        ]
    )


def first_of_node() -> bool:
    """Whether no other rank of this node has a lower number."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def reporting_rank() -> int:
    """This process's number, to decide which process reports an error; 0 if it has none."""
    starter = _starter()
    rank = os.environ.get(starter[2], "") if starter else ""
    return int(rank) if _is_number(rank) else 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 8


def launcher_reports() -> bool:
    """Whether the process that started this rank is a launcher that reports its errors."""
    return os.environ.get(REPORTER_ENV) == str(os.getppid())


def tell_torchrun(message: str, *, wait: bool = False) -> None:
    """Write the reason of this rank's failure into torchrun's error file, for torchrun's report.

    Does nothing if the rank was started by `torchtitan train`, which reports errors itself.

    Args:
        wait: another rank reports the error and must exit first.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or launcher_reports():
        return
    # as torch's own handler writes it
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
    if wait:
        time.sleep(_GIVE_WAY_SECONDS)


def run_main(
    main: Callable[[list[str]], int | None], argv: list[str] | None = None, *, rank: int = 0
) -> int:
    """Run `main(argv)` and return its exit code. Each failure is reported once, by the rank that
    caused it. Output is escaped, so it can't control the terminal.

    Prints the message of a `UserError`, one line if another rank has died, and the traceback of any
    other error. Only rank 0 reports errors that all ranks have in common.
    """
    _open_closed_streams()
    with _escaping():
        return _run_main(main, sys.argv[1:] if argv is None else argv, rank)


def _run_main(main: Callable[[list[str]], int | None], argv: list[str], rank: int) -> int:
    try:
        code = main(argv) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        if isinstance(error.__cause__, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        reports = rank == 0 or not error.on_all_ranks
        if "RANK" in os.environ and first_of_node() and isinstance(error, ConfigError):
            reports = True  # only this node, or this pod, may have it
        if reports:
            report(error)
        tell_torchrun(error_text(error), wait=not reports)
        return error.exit_code
    except KeyboardInterrupt:
        if rank == 0:
            print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        if os.environ.get(DEBUG_ENV) != "1" and failure_of(error).elsewhere:
            print(f"rank {rank}: stopped because another rank failed", file=sys.stderr)
        else:
            traceback.print_exception(error)
            tell_torchrun(error_text(error))
        return 1


def _open_closed_streams() -> None:
    """Replace standard streams that were closed, as daemons do, by the null device. Otherwise
    the next files to be opened get their numbers, and output of C++ or a child goes into them.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


class _Escaping:
    """Standard output or error with control characters escaped, for text from untrusted files."""

    def __init__(self, stream: TextIO):
        self.unescaped = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)

    def write(self, text: str) -> int:
        returns = text[:1] == "\r"  # as progress bars begin
        self.unescaped.write("\r" * returns + escaped(text[returns:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


@contextmanager
def _escaping() -> Iterator[None]:
    """Within, escape control characters in the output."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Escaping(unescaped(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unescaped(stream: TextIO) -> TextIO:
    """The original stream, for a progress bar, which controls the terminal."""
    return stream.unescaped if isinstance(stream, _Escaping) else stream


def _nobody_reads() -> bool:
    """Whether the process that reads standard output, for example `head`, has exited."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # or Python complains at its exit
    return True
