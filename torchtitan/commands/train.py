"""Start the ranks of this node: `torchtitan train --nproc-per-node 8 -- --job.config_file X.toml ...`.

torchrun with four additions: the configuration is checked first, in this one process, for every number of nodes that
may come; restarts get a fresh store; SIGTERM and SIGUSR1 let the ranks save, however long that takes, and end with
status 75; and a failure ends with its cause in one sentence instead of torchrun's report.
Options that are not listed here are torchrun's.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from torchtitan.config import resolve
from torchtitan.config.schema import Config
from torchtitan.observe.diagnosis import diagnose, killed
from torchtitan.observe.evidence import read_case
from torchtitan.train.entry import LAUNCHER_ENV
from torchtitan.train.entry import main as train
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import DEBUG_ENV, ConfigError
from torchtitan.utils.signals import STOP_SIGNALS

RENDEZVOUS = "last_call_timeout=3,join_timeout=600,keep_alive_interval=2,keep_alive_max_attempt=5"
"""Nodes that come later join within seconds, and one that is silent for ten is given up."""
ELASTIC_RESTARTS = 10


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Own options, torchrun's, and the trainer's."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="torchtitan train", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks on this node")
    parser.add_argument("--nnodes", type=node_range, default=(1, 1), help="number of nodes, or MIN:MAX")
    parser.add_argument("--rdzv-endpoint", default="", help="host:port of the first node (several nodes)")
    parser.add_argument("--rdzv-conf", default=RENDEZVOUS, help=f"how nodes find together ({RENDEZVOUS})")
    parser.add_argument(
        "--max-restarts",
        type=int,
        help=f"starts after a failure, from the last checkpoint (0; {ELASTIC_RESTARTS} with MIN:MAX nodes)",
    )
    parser.add_argument("--grace", type=float, default=600, help="seconds to save in when asked to stop (600)")
    options, others = parser.parse_known_args(argv[:split])
    if options.nnodes[1] > 1 and not options.rdzv_endpoint:
        parser.error("--rdzv-endpoint: with several nodes give all of them host:port of the first")
    return options, others, argv[split + 1 :]


def node_range(text: str) -> tuple[int, int]:
    """Fewest and most nodes of `N` or `MIN:MAX`."""
    fewest, _, most = text.partition(":")
    nodes = (int(fewest), int(most or fewest)) if f"{fewest}{most}".isdecimal() else (0, 0)
    if not 1 <= nodes[0] <= nodes[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of nodes nor MIN:MAX")
    return nodes


def check(train_argv: list[str], nodes: tuple[int, int], ranks: int, *, output: bool = True) -> Config:
    """Refuse what would fail under any number of nodes that may come, with `ranks` on each.

    Args:
        output: also make the dump folder, and see that it can be written to.

    Returns:
        The configuration for all of them.

    Raises:
        ConfigError: everything that is wrong.
    """
    fewest, most = nodes
    config = resolve(train_argv, most * ranks).config
    if fewest < most and not config.fault_tolerance.elastic:
        raise ConfigError(
            [f"--nnodes: {fewest}:{most} nodes need fault_tolerance.elastic = true, or the batch would follow them"]
        )
    for count in range(fewest, most):
        try:
            resolve(train_argv, count * ranks)
        except ConfigError as error:
            raise ConfigError([f"with {count} of {most} nodes: {problem}" for problem in error.problems]) from error
    preflight(config, output=output)
    return config


class _Stop:
    """Answers SIGTERM and SIGUSR1. Unlike torchrun's own handler it doesn't kill the ranks after 30 seconds."""

    def __init__(self, grace: float):
        self.grace = grace
        self.running = False
        """torchrun is."""
        self.requested = False
        self.statuses: list[int] = []
        """How the ranks ended: exit statuses, or signals as negative numbers."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if self.requested:
            return
        self.requested = True
        if not self.running:
            raise SystemExit(os.EX_TEMPFAIL)
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self._stop_ranks()
        # What torchrun would raise: it leaves the rendezvous without closing it to the other nodes.
        raise SignalException("asked to stop", signal.Signals(number))

    def _stop_ranks(self) -> None:
        """Ask the ranks of this node to save and end; wait for them."""
        ranks = psutil.Process().children()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        for rank in ranks:
            while (ended := _ended(rank.pid)) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if ended is None:
                print(f"error: a rank did not save and end within --grace {self.grace:g} s", file=sys.stderr)
                rank.kill()
                ended = -signal.SIGKILL
            self.statuses.append(ended)

    def status(self) -> int:
        """Of this process, once torchrun is unwound."""
        if self.statuses and not any(self.statuses):
            return 0
        status = _common_status(self.statuses)
        if status != os.EX_TEMPFAIL:
            print(f"error: asked to stop, the ranks ended with {self.statuses} instead of 75", file=sys.stderr)
        return status


def _ended(pid: int) -> int | None:
    """How a child ended, left to be collected by torchrun; None while it runs."""
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # collected already
        return os.EX_TEMPFAIL
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _common_status(statuses: list[int]) -> int:
    """75 if all ranks saved, or were stopped before they knew of signals; else 1."""
    return os.EX_TEMPFAIL if set(statuses) <= {0, os.EX_TEMPFAIL, -signal.SIGTERM, -signal.SIGUSR1} else 1


def _cause(config: Config, first: int, failures: Mapping[int, Any]) -> str:
    """Why the run ended: what its ranks wrote, if these did, else how the one ended that was the first to."""
    exits = {rank: failure.exitcode for rank, failure in failures.items()}
    case = read_case(Path(config.job.dump_folder, config.comm.save_traces_folder), config.comm.save_traces_file_prefix)
    if case and any(w.pid == failures[rank].pid for rank, w in case.witnesses.items() if rank in failures):
        return diagnose(case, exits)
    return f"rank {first} {killed(exits[first]) if exits[first] < 0 else f'ended with exit code {exits[first]}'}"


def main(argv: list[str]) -> int:
    options, torchrun_argv, train_argv = _parse(argv)
    stop = _Stop(options.grace)
    config = check(train_argv, options.nnodes, options.nproc_per_node)
    fewest, most = options.nnodes
    restarts = options.max_restarts
    if restarts is None:
        restarts = ELASTIC_RESTARTS if fewest < most else 0
    if most * options.nproc_per_node == 1 and not restarts and "RANK" not in os.environ:
        return train(train_argv)

    # Without this a restarted worker reads its predecessor's addresses from the agent's store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.nproc_per_node))
    if fewest == most:  # else ranks that stop may make room for another number of nodes
        os.environ[LAUNCHER_ENV] = str(os.getpid())

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if os.environ.get(DEBUG_ENV) != "1":
        for name in list(logging.root.manager.loggerDict):  # torch gives each a level of its own
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    where = (
        ["--standalone"]
        if most == 1
        else ["--rdzv-backend=c10d", f"--rdzv-endpoint={options.rdzv_endpoint}", f"--rdzv-conf={options.rdzv_conf}"]
    )
    nodes = [f"--nnodes={fewest}:{most}", f"--nproc-per-node={options.nproc_per_node}", f"--max-restarts={restarts}"]
    handled = "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"
    stop.running = True
    try:
        torchrun([*where, *nodes, handled, *torchrun_argv, "-m", "torchtitan.train", *train_argv])
    except ChildFailedError as error:
        if _common_status([failure.exitcode for failure in error.failures.values()]) == os.EX_TEMPFAIL:
            return os.EX_TEMPFAIL
        rank, failure = error.get_first_failure()
        print(f"error: {_cause(config, rank, error.failures)}", file=sys.stderr)
        return max(failure.exitcode, 1)
    except SignalException as error:
        return stop.status() if error.sigval in STOP_SIGNALS else 128 + error.sigval
    return 0
