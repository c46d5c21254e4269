"""Run the ranks of a cluster on this machine, without a GPU, and check that they can't hang.

Each rank runs a step, its report, a validation, a save and a resume on a process group without a
network. Their groups, collectives, sends and receives are then compared. Refuses what the trainer
refuses, in the same words. Exits with 1 if the ranks would hang.
"""

import argparse

from torchtitan.config import resolve
from torchtitan.config.load.command_line import parse_args
from torchtitan.tools.planner.planner import without_missing_files
from torchtitan.tools.rehearsal.rehearsal import EVERY_RANK_BELOW, rehearse
from torchtitan.tools.rehearsal.render import as_text
from torchtitan.train.preflight import preflight
from torchtitan.utils.argument_types import command_parser, count
from torchtitan.utils.errors import show_warnings


def parser() -> argparse.ArgumentParser:
    parser = command_parser("rehearse", __doc__)
    add = parser.add_argument
    add("--world", type=count, default=1, metavar="N", help="number of ranks (default: 1)")
    add(
        "--ranks", type=int, nargs="+", default=[], metavar="RANK", help="rehearse these ranks, too"
    )
    add(
        "--every-rank",
        action=argparse.BooleanOptionalAction,
        help=f"rehearse all ranks, each in seconds (default: below {EVERY_RANK_BELOW} ranks)",
    )
    add(
        "--layers",
        type=count,
        metavar="N",
        help="layers of each stage that run (default: 1; 2 without a pipeline)",
    )
    return parser


def main(argv: list[str]) -> int:
    command = parser()
    options, flags = parse_args(command, argv or ["--help"], file_required=True)
    if outside := [rank for rank in options.ranks if not 0 <= rank < options.world]:
        command.error(
            f"--ranks: there is no rank {outside[0]} among {options.world}; --world sets their "
            "number"
        )
    resolved = resolve(flags, options.world, check=False)
    show_warnings(resolved.warnings)
    config, _ = without_missing_files(resolved.config)
    setup = preflight(
        config, whole=resolved.config, world=options.world, sources=resolved.sources, output=False
    )
    show_warnings(setup.warnings)
    every_rank = options.every_rank
    if every_rank is None:
        every_rank = options.world < EVERY_RANK_BELOW
    ranks = range(options.world) if every_rank else options.ranks
    result = rehearse(config, options.world, ranks=ranks, layers=options.layers)
    print(as_text(result))
    return 1 if result.faults else 0
