"""Runs the ranks of this node through torchrun to their end, and reports why they failed."""

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import SIGABRT, SIGKILL
from typing import Any

from torchtitan.config import Config
from torchtitan.health.diagnose import diagnose
from torchtitan.health.rank_dumps import read_crashes, read_dumps
from torchtitan.tools.launch.ranks import SECRET_ENV, StopHandler, common_status
from torchtitan.train.rank_main import LAUNCHER_ENV, command_line
from torchtitan.utils.errors import DEBUG_ENV, OutOfMemoryError, UserError
from torchtitan.utils.process import REPORTER_ENV
from torchtitan.utils.signals import STOP_SIGNALS, kill_text

_TORCHRUN_WAITS = 20
"""Seconds after the first failure from which a SIGKILL is torchrun's own: it gives the other ranks
30 to end.
"""
_DUMPED_BEFORE = 120
"""Seconds before a failure in which NCCL's watchdog may have written its dump."""
_LOGS = ("-r", "-t", "--redirects", "--tee", "--log")
"""Options of torchrun that write the ranks' output to files."""


# ---- starting


@contextmanager
def no_cpp_stacks() -> Iterator[None]:
    """Silence the C++ stacks that torch prints on every node when another one leaves or can't be
    reached. Import torch in this context, since torch reads its log level then.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ or os.environ.get(DEBUG_ENV) == "1":
        yield
        return
    os.environ[name] = "FATAL"
    try:
        yield
    finally:
        os.environ.pop(name, None)  # ranks have their own


def run_ranks(
    options: argparse.Namespace,
    torchrun_argv: list[str],
    config_argv: list[str],
    config: Config,
    stop: StopHandler,
) -> int:
    """Run all ranks of this node to their end; returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    from torchtitan.tools.launch.rendezvous import explain, register

    _set_environment(options)
    arguments = [
        *_torchrun_options(options),
        # Without logs, no folder that a killed launcher would leave.
        *([] if any(word.startswith(_LOGS) for word in torchrun_argv) else ["--log-dir=/dev/null"]),
        *torchrun_argv,
        "-m",
        "torchtitan.train",
        *config_argv,
    ]
    register(os.environ.pop(SECRET_ENV, ""))  # the ranks don't need it
    if os.environ.get(DEBUG_ENV) != "1":
        for name in list(logging.root.manager.loggerDict):  # torch sets the level of each
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    stop.running = True
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        statuses = [failure.exitcode for failure in error.failures.values()]
        if common_status(statuses) == os.EX_TEMPFAIL:
            return os.EX_TEMPFAIL
        rank, failure = error.get_first_failure()
        cause = _cause(config, rank, error.failures)
        print(f"error: {cause}", file=sys.stderr)
        if OutOfMemoryError.exit_code in statuses:
            world = options.nnodes[1] * options.nproc_per_node
            print(what_lowers_memory(config, world), file=sys.stderr)
        return max(failure.exitcode, 1)
    except RendezvousError as error:
        raise UserError(f"--rdzv-endpoint={options.rdzv_endpoint}: {explain(error)}") from error
    except SignalException as error:
        if error.sigval not in STOP_SIGNALS:
            return 128 + error.sigval
        if LAUNCHER_ENV not in os.environ:
            print(f"This node leaves the run, as asked. To join again:\n  {command_line()}")
        return stop.status()
    return 0


def _set_environment(options: argparse.Namespace) -> None:
    """Set the environment variables that several ranks inherit."""
    # Otherwise a restarted worker reads its predecessor's addresses from the agent's store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.nproc_per_node))
    )
    os.environ[REPORTER_ENV] = str(os.getpid())
    fewest, most = options.nnodes
    if fewest == most:  # in a range, ranks may also stop to make room for another number of nodes
        os.environ[LAUNCHER_ENV] = str(os.getpid())


def _torchrun_options(options: argparse.Namespace) -> list[str]:
    from torchtitan.tools.launch.rendezvous import BACKEND

    fewest, most = options.nnodes
    return [
        f"--rdzv-backend={BACKEND}",
        f"--rdzv-endpoint={options.rdzv_endpoint or 'localhost'}",
        f"--rdzv-conf={options.rdzv_conf}",
        # Several nodes keep torch's id: one with another secret is refused at once instead of
        # waiting for the others.
        *([f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1"] if most == 1 else []),
        f"--nnodes={fewest}:{most}",
        f"--nproc-per-node={options.nproc_per_node}",
        f"--max-restarts={options.max_restarts}",
        "--signals-to-handle=SIGQUIT",  # StopHandler handles the others
        *([f"--numa-binding={options.numa_binding}"] if options.numa_binding else []),
    ]


# ---- failing


def _cause(config: Config, first: int, failures: Mapping[int, Any]) -> str:
    """Why the run failed: by the reports of failed ranks, else by the first rank's exit code."""
    began = min(failure.timestamp for failure in failures.values())
    exits = {
        rank: failure.exitcode
        for rank, failure in failures.items()
        if failure.exitcode != -SIGKILL or failure.timestamp - began < _TORCHRUN_WAITS
    }
    folder = Path(config.job.dump_folder, config.comm.save_traces_folder)
    prefix = config.comm.save_traces_file_prefix
    crashes = read_crashes(folder)
    code = exits[first]
    end = f"ended with exit code {code}"
    if code < 0:
        end = kill_text(code, crashes.get(first, [""])[0])
    dumps = read_dumps(folder, prefix)
    if dumps and any(
        dump.pid == failures[rank].pid for rank, dump in dumps.by_rank.items() if rank in failures
    ):
        return diagnose(dumps, exits, crashes)
    if -SIGABRT in exits.values():
        # NCCL's watchdog writes the Flight Recorder, and ends the process, without any Python.
        dumps = read_dumps(folder, prefix, since=began - _DUMPED_BEFORE)
        if dumps:
            return f"{diagnose(dumps, exits)} (rank {first} {end})"
    return f"rank {first} {end}"


def what_lowers_memory(config: Config, world: int) -> str:
    """The planner's advice for a run that ran out of memory, or why the planner has failed; empty
    without advice.
    """
    from torchtitan.models import get_spec
    from torchtitan.tools.planner.advice import advice

    try:
        return advice(config, get_spec(config.model.name), world)
    except Exception as error:  # the run's own failure and its exit code matter more
        return f"The planner failed, so it advises nothing: {type(error).__name__}: {error}"
