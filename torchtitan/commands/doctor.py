"""Explain why a run hangs or has failed; or, without DIR, report this machine's GPUs.

DIR is the run's dump folder, or the folder in it (`comm.save_traces_folder`) where ranks write
reports: when a collective times out, when a rank raises an exception, and on SIGUSR2.

Without DIR: names, driver and versions, and what makes a GPU slow or unreliable. Fails if torch
can't use the GPUs. `benchmarks/gpu/gpu.py` measures them.
"""

import argparse
from pathlib import Path

from torchtitan.config.sections.schema import Comm
from torchtitan.health.diagnose import diagnose
from torchtitan.health.rank_dumps import read_dumps
from torchtitan.utils.accelerators import read_accelerators
from torchtitan.utils.argument_types import command_parser
from torchtitan.utils.errors import UserError


def parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", __doc__)
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        nargs="?",
        help="the run's dump folder, or its folder of reports",
    )
    parser.add_argument(
        "--prefix",
        default=Comm().save_traces_file_prefix,
        help="comm.save_traces_file_prefix of the run (%(default)s)",
    )
    return parser


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    return _explain(options.folder, options.prefix) if options.folder else _describe_machine()


def _describe_machine() -> int:
    accelerators = read_accelerators()
    accelerators.check()
    print("\n".join([str(accelerators), *accelerators.warnings()]))
    return 0


def _report(folder: Path, prefix: str) -> list[str]:
    """The diagnosis and each rank's activity; empty if there are no reports."""
    dumps = read_dumps(folder, prefix)
    if dumps is None:
        return []
    doing = {rank: f"it {dump.doing()}" for rank, dump in sorted(dumps.by_rank.items())}
    doing |= dict(sorted(dumps.silent.items()))
    return [diagnose(dumps), *(f"  rank {rank}: {text}" for rank, text in doing.items())]


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
