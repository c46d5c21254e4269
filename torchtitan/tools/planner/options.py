"""The options of `torchtitan plan`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.load.command_line import parse_args
from torchtitan.tools.planner.hardware import load_hardware
from torchtitan.utils.argument_types import command_parser, count, number, path_or_url
from torchtitan.utils.assets import shipped_configs


def options_of(description: str | None) -> argparse.ArgumentParser:
    parser = command_parser("plan", description)
    add = parser.add_argument
    add(
        "--world",
        type=count,
        metavar="N",
        help="number of ranks; without it, the best plans on 1, 2, 4, ... GPUs are compared",
    )
    add(
        "--hardware",
        type=path_or_url,
        metavar="NAME",
        help=f"one of {', '.join(load_hardware())}, or a TOML file; required",
    )
    _add_budget(parser)
    _add_search(parser)
    _add_outputs(parser)
    return parser


def _add_budget(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tokens",
        type=number,
        metavar="N",
        help="tokens to train on, for example 15e12 (default: those of training.steps)",
    )
    add(
        "--days",
        type=number,
        metavar="D",
        help="without --world: plan the fewest GPUs that train the tokens in D days (default: 30)",
    )
    add(
        "--money", type=number, metavar="PRICE", help="price of a GPU-hour: add the cost of the run"
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--search",
        action="store_true",
        help="find the best layouts of this model and batch, and plan the first",
    )
    add(
        "--compare",
        nargs="+",
        metavar="TOML",
        help="compare two TOML files, or CONFIG.toml with another, side by side",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--write",
        type=path_or_url,
        metavar="FILE",
        help="write the planned configuration as a TOML file, ready to train",
    )
    add(
        "--json",
        type=path_or_url,
        metavar="FILE",
        help="write the plan as JSON; - prints it, and nothing else",
    )
    add(
        "--html",
        type=path_or_url,
        metavar="FILE",
        help="write a page with charts, and its figures as JSON beside it",
    )
    add(
        "--from-run",
        type=Path,
        metavar="DIR",
        help="print the plan of the run in this dump folder beside its measurements",
    )
    add(
        "--output",
        type=path_or_url,
        metavar="FILE",
        help="with --from-run: write a hardware file that is fitted to the run, for --hardware",
    )


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the configuration's flags."""
    options, flags = parse_args(parser, argv)
    files = len(options.compare or ()) + bool(options.config)
    has_config = options.config or options.world or options.search or options.compare
    conflicts = {
        "--compare needs two TOML files": options.compare and files != 2,
        "--days chooses the number of GPUs; drop it, or --world": options.days
        and (options.world or options.from_run),
        "--from-run takes the configuration and the number of ranks from the run; drop them and "
        "--search": options.from_run and has_config,
        "--output needs --from-run: a hardware file is fitted to a run": options.output
        and not options.from_run,
    }
    for message, applies in conflicts.items():
        if applies:
            parser.error(message)
    if options.compare and not options.config:
        flags = [f"--job.config_file={options.compare[0]}", *flags]
    if not options.from_run and (gaps := list(_gaps(options, flags))):
        parser.error("name\n" + "\n".join(f"  {line}" for line in gaps))
    return options, flags


def _gaps(options: argparse.Namespace, flags: list[str]) -> Iterator[str]:
    """Options that a plan needs and the command line lacks, with the choices."""
    if not flags:
        yield (
            f"CONFIG.toml: one of {', '.join(shipped_configs())}, a file, or a Hugging Face folder "
            "or config.json"
        )
    if options.compare and options.world is None:
        yield "--world N: the number of GPUs"
    if options.hardware is None:
        yield (
            f"--hardware NAME: one of {', '.join(load_hardware())}, cpu (this machine's), or a "
            "TOML file (--from-run DIR --output FILE writes one)"
        )
