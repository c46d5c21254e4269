"""Explain why a run hangs or has failed; or, with --gpu, measure this node beside the plan.

DIR is the run's dump folder, or the folder in it (`comm.save_traces_folder`) where ranks write
reports: when a collective times out, when a rank raises an exception, and on SIGUSR2.

--gpu checks driver, memory and links of this node's GPUs, and measures matrix products and each
kind of collective in under two minutes. Without a GPU it measures the CPU. Exits with 1 if a rank
fails, hangs or receives wrong numbers.
"""

import argparse
import tempfile
from pathlib import Path

from torchtitan.config.sections.schema import Comm
from torchtitan.health.diagnose import diagnose
from torchtitan.health.rank_dumps import read_dumps
from torchtitan.utils.argument_types import command_parser, count
from torchtitan.utils.errors import UserError

SECONDS = 120
CPU_RANKS = 2


def parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "doctor", __doc__, usage="torchtitan doctor DIR\n       torchtitan doctor --gpu"
    )
    add = parser.add_argument
    add(
        "folder",
        type=Path,
        metavar="DIR",
        nargs="?",
        help="the run's dump folder, or its folder of reports",
    )
    add(
        "--prefix",
        default=Comm().save_traces_file_prefix,
        help="comm.save_traces_file_prefix of the run (%(default)s)",
    )
    add("--gpu", action="store_true", help="measure this node's GPUs and links")
    add(
        "--nproc-per-node",
        type=count,
        metavar="N",
        help=f"ranks that measure (all GPUs; {CPU_RANKS} on a CPU)",
    )
    add("--hardware", metavar="NAME", help="compare with this hardware of `torchtitan plan`")
    add(
        "--limit",
        type=count,
        default=SECONDS,
        metavar="SECONDS",
        help="time after which ranks are killed (%(default)s)",
    )
    return parser


def _report(folder: Path, prefix: str) -> list[str]:
    """The diagnosis and each rank's activity; empty if there are no reports."""
    dumps = read_dumps(folder, prefix)
    if dumps is None:
        return []
    doing = {rank: f"it {dump.doing()}" for rank, dump in sorted(dumps.by_rank.items())}
    doing |= dict(sorted(dumps.silent.items()))
    return [diagnose(dumps), *(f"  rank {rank}: {text}" for rank, text in doing.items())]


def main(argv: list[str]) -> int:
    command = parser()
    options = command.parse_args(argv)
    if options.gpu == (options.folder is not None):
        command.error("give the folder of a run, or --gpu")
    if options.gpu:
        return _check_node(options.nproc_per_node, options.hardware, options.limit)
    return _explain(options.folder, options.prefix)


def _check_node(ranks: int | None, hardware: str | None, seconds: int) -> int:
    from torchtitan.tools.planner.hardware import find_hardware, hardware_with

    hw = find_hardware(hardware) if hardware else None

    # torch, once the options are known to be right
    from torchtitan.tools.node_check.check import report, run_ranks
    from torchtitan.tools.node_check.state import read_state, refuse_unusable, warnings_of

    state = read_state()
    refuse_unusable(state)
    if ranks and state.usable and ranks > state.usable:
        raise UserError(f"--nproc-per-node={ranks}: torch sees {state.usable} GPUs here")
    print("\n".join([state.describe(), *warnings_of(state)]), flush=True)
    with tempfile.TemporaryDirectory(prefix="node-check-") as folder:
        results = run_ranks(ranks or state.usable or CPU_RANKS, Path(folder), seconds)
    device = results[0].about.get("device", "")
    right, text = report(results, hw or hardware_with(device))
    print(text, flush=True)
    return 0 if right else 1


def _explain(run: Path, prefix: str) -> int:
    for folder in (run, run / Comm().save_traces_folder):
        try:
            lines = _report(folder, prefix) if folder.is_dir() else []
        except (
            OSError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise UserError(
                f"{folder}: a report is damaged: {type(error).__name__}: {error!s:.200}"
            ) from error
        if lines:
            print("\n".join(lines))
            return 0
    raise UserError(
        f"{run}: no rank has written anything here. Reports are in "
        "comm.save_traces_folder below job.dump_folder, once a run hangs, fails, or receives "
        "SIGUSR2."
    )
