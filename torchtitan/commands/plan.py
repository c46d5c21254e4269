"""Predict the memory and speed of a configuration without a GPU, and what would lower its largest costs.

Refuses what the trainer refuses, in the same words. Exits with 1 if the plan does not fit.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from torchtitan.config.command_line import parse_args
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.page import page, pictures, schedule_svg
from torchtitan.plan.planner import make_plan, planned_toml
from torchtitan.plan.report import as_data, as_text, comparison, origin, search_data, search_table
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.text import count

_TERMINAL = "-"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--world", type=count, default=1, metavar="N", help="number of ranks (default: 1)")
    add("--hardware", default="h100-sxm", metavar="NAME", help="a built-in name or a TOML file (default: h100-sxm)")
    add(
        "--tokens",
        type=_tokens,
        metavar="N",
        help="tokens to train on, for example 15e12 (default: those of training.steps)",
    )
    add("--search", action="store_true", help="find the fastest layout of this model and batch, and plan that")
    add("--fast", action="store_true", help="compute the memory of the plan instead of tracing it")
    add(
        "--compare", nargs="+", metavar="TOML", help="compare two TOML files, or CONFIG.toml with another, side by side"
    )
    add("--write", metavar="FILE", help="write the planned configuration as a TOML file, ready to train")
    add("--json", metavar="FILE", help="write the plan as JSON; - prints it, and nothing else")
    add("--html", metavar="FILE", help="write a page with charts, and its figures as JSON beside it")
    add("--schedule-svg", metavar="FILE", help="draw the pipeline's schedule")
    add("--calibrate", metavar="FILE", help="measure this machine, and write a file for --hardware")
    return parser


def main(argv: list[str]) -> int:
    options, flags = _parse(argv or ["--help"])
    if options.calibrate:
        from torchtitan.plan.calibrate import calibrate

        _write(options.calibrate, calibrate())
        print(f"Measured this machine. To plan for it: --hardware {options.calibrate}")
        return 0
    hardware = find_hardware(options.hardware)
    plan, found = make_plan(flags, options.world, hardware, searching=options.search, tracing=not options.fast)
    other = None
    if options.compare:
        other_flags = [*flags, f"--job.config_file={options.compare[-1]}"]  # the last file counts
        other, _ = make_plan(other_flags, options.world, hardware, tracing=not options.fast)
    if options.write:
        _write(options.write, planned_toml(plan, flags))
    data: dict[str, Any] = as_data(plan, options.tokens) | origin(argv, planned_toml(plan, flags))
    data |= {"search": search_data(found)} if found else {}
    data |= {"compared": as_data(other, options.tokens)} if other else {}
    if options.json and options.json != _TERMINAL:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    if options.html:
        shown = data | pictures(plan, found.best if found else [])
        _write(options.html, page(shown))
        _write(str(Path(options.html).with_suffix(".json")), json.dumps(shown, indent=1) + "\n")
    if options.schedule_svg:
        if plan.time.timeline is None:
            raise UserError(
                "--schedule-svg: there is no pipeline; set parallelism.pipeline_parallel_degree, or drop it"
            )
        _write(options.schedule_svg, schedule_svg(plan.time))
    if options.json == _TERMINAL:
        print(json.dumps(data, indent=1))
    else:
        tables = [search_table(found)] if found else []
        tables += [comparison(plan, other)] if other else []
        print("\n\n".join([*tables, as_text(plan, options.tokens)]))
        for option in ("write", "json", "html", "schedule_svg"):
            if file := getattr(options, option):
                print(f"wrote {file}")
    return 0 if plan.fits else 1


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the configuration's flags."""
    own = parser()
    options, flags = parse_args(own, argv)
    if options.compare and (len(options.compare) + bool(options.config)) != 2:
        own.error("--compare needs two TOML files")
    if options.compare and not options.config:
        flags = [f"--job.config_file={options.compare[0]}", *flags]
    return options, flags


def _tokens(text: str) -> float:
    try:
        if (number := float(text)) > 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, for example 15e12")


def _write(file: str, content: str) -> None:
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.encode())
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror or error}") from None
