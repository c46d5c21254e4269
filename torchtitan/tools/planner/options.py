"""The options of `torchtitan plan`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.load.command_line import parse_args
from torchtitan.tools.planner.hardware import load_hardware
from torchtitan.utils.argument_types import command_parser, count, number, path_or_url
from torchtitan.utils.assets import shipped_configs
from torchtitan.utils.wording import listed


def options_of(description: str | None) -> argparse.ArgumentParser:
    parser = command_parser("plan", description)
    parser.add_argument(
        "--search",
        action="store_true",
        help="find the best layouts of this model and batch, and plan the first",
    )
    hardware = f"one of {', '.join(load_hardware())}, or a TOML file; required"
    for name, kind, metavar, text in (
        (
            "--world",
            count,
            "N",
            "number of ranks; without it, the best plans on 1, 2, 4, ... GPUs are compared",
        ),
        ("--hardware", path_or_url, "NAME", hardware),
        (
            "--tokens",
            number,
            "N",
            "tokens to train on, for example 15e12 (default: those of training.steps)",
        ),
        (
            "--days",
            number,
            "D",
            "without --world: plan the fewest GPUs that train the tokens in D days (default: 30)",
        ),
        (
            "--write",
            path_or_url,
            "FILE",
            "write the planned configuration as a TOML file, ready to train",
        ),
        ("--json", path_or_url, "FILE", "write the plan as JSON; - prints it, and nothing else"),
        (
            "--html",
            path_or_url,
            "FILE",
            "write a page with charts, and its figures as JSON beside it",
        ),
        (
            "--from-run",
            Path,
            "DIR",
            "print the plan of the run in this dump folder beside its measurements",
        ),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=text)
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the configuration's flags."""
    options, flags = parse_args(parser, argv)
    has_config = options.config or options.world or options.search
    files = filter(None, (options.write, options.json, options.html))
    folders = [file for file in files if Path(file).is_dir()]
    conflicts = {
        f"{listed(folders)}: is a folder; name a file in it": folders,
        "--days chooses the number of GPUs; drop it, or --world": options.days
        and (options.world or options.from_run),
        "--from-run takes the configuration and the number of ranks from the run; drop them and "
        "--search": options.from_run and has_config,
    }
    for message, applies in conflicts.items():
        if applies:
            parser.error(message)
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
    if options.hardware is None:
        yield (
            f"--hardware NAME: one of {', '.join(load_hardware())}, cpu (this machine's), or a "
            "TOML file"
        )
