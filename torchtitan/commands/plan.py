"""Predict the memory and speed of a configuration without a GPU, and what would lower its largest costs.

Refuses what the trainer refuses, in the same words. Exits with 1 if the plan does not fit.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.config.command_line import parse_args
from torchtitan.plan.axes import AXES
from torchtitan.plan.budget import Failures, budget_of, budget_text
from torchtitan.plan.hardware import find_hardware, load_hardware
from torchtitan.plan.page import page, pictures, schedule_svg
from torchtitan.plan.planner import make_plan, planned_toml
from torchtitan.plan.report import as_data, as_text, comparison, origin, search_data, search_table
from torchtitan.utils.assets import shipped_configs
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.text import count

_TERMINAL = "-"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--world", type=count, metavar="N", help="number of ranks; required")
    add("--hardware", metavar="NAME", help=f"one of {', '.join(load_hardware())}, or a TOML file; required")
    add(
        "--tokens",
        type=_tokens,
        metavar="N",
        help="tokens to train on, for example 15e12 (default: those of training.steps)",
    )
    add("--money", type=_positive, metavar="PRICE", help="price of a GPU-hour: add the cost of the run")
    add(
        "--mtbf",
        type=_positive,
        metavar="HOURS",
        help="mean time between failures of a GPU: add goodput and the best interval between checkpoints. Llama 3's "
        "419 interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783) are one per 50,700 hours of a GPU",
    )
    add("--storage", type=_positive, metavar="GB/S", help="rate at which all ranks together write checkpoints")
    add("--restart", type=_positive, default=10.0, metavar="MINUTES", help="to restart after a failure (default: 10)")
    add("--search", action="store_true", help="find the best layouts of this model and batch, and plan the first")
    varied = "; ".join(f"{name}: {text}" for name, text in AXES.items())
    add("--axes", type=_axes, default=(), metavar="NAME,...", help=f"what --search varies, too. {varied}")
    add("--fast", action="store_true", help="compute the memory of the plan instead of tracing it")
    add(
        "--compare", nargs="+", metavar="TOML", help="compare two TOML files, or CONFIG.toml with another, side by side"
    )
    add("--write", metavar="FILE", help="write the planned configuration as a TOML file, ready to train")
    add("--json", metavar="FILE", help="write the plan as JSON; - prints it, and nothing else")
    add("--html", metavar="FILE", help="write a page with charts, and its figures as JSON beside it")
    add("--schedule-svg", metavar="FILE", help="draw the pipeline's schedule")
    add("--from-run", metavar="DIR", help="compare the run in this dump folder with its plan")
    add(
        "--calibrate",
        metavar="FILE",
        help="measure this machine, and write a file for --hardware; with --from-run, fit one to the run",
    )
    return parser


def main(argv: list[str]) -> int:
    options, flags = _parse(argv or ["--help"])
    if options.from_run:
        return _compare_run(options, flags)
    if options.calibrate:
        return _calibrate(options.calibrate)
    hardware = find_hardware(options.hardware)
    plan, found = make_plan(
        flags, options.world, hardware, searching=options.search, tracing=not options.fast, axes=options.axes
    )
    other = None
    if options.compare:
        other_flags = [*flags, f"--job.config_file={options.compare[-1]}"]  # the last file counts
        other, _ = make_plan(other_flags, options.world, hardware, tracing=not options.fast)
    if options.write:
        _write(options.write, planned_toml(plan, flags))
    data: dict[str, Any] = as_data(plan, options.tokens) | origin(argv, planned_toml(plan, flags))
    failures = Failures(options.mtbf, options.storage * 1e9, options.restart) if options.mtbf else None
    budget = budget_of(plan, options.tokens, failures, options.money) if failures or options.money else None
    data |= {"budget": asdict(budget)} if budget else {}
    data |= {"search": search_data(found)} if found else {}
    data |= {"compared": as_data(other, options.tokens)} if other else {}
    if options.json and options.json != _TERMINAL:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    if options.html:
        shown = data | pictures(plan, [proposal.plan for proposal in found.best] if found else [])
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
        tables.append(as_text(plan, options.tokens))
        tables += [budget_text(budget, plan, failures, options.money)] if budget else []
        print("\n\n".join(tables))
        for option in ("write", "json", "html", "schedule_svg"):
            if file := getattr(options, option):
                print(f"wrote {file}")
    return 0 if plan.fits else 1


def _calibrate(file: str) -> int:
    from torchtitan.plan.calibrate import calibrate, unmeasured

    if (text := calibrate()) is not None:
        _write(file, text)
        print(f"Measured this machine. To plan for it: --hardware {file}")
        for key in unmeasured(text):
            print(f"note: {key} could not be measured by this start; fill it in for plans that need it (see {file})")
    return 0


def _compare_run(options: argparse.Namespace, flags: list[str]) -> int:
    from torchtitan.plan import measured

    run = measured.read_run(Path(options.from_run))
    hardware = find_hardware(options.hardware) if options.hardware else measured.hardware_of(run)
    plan = measured.plan_run(run, flags, hardware, tracing=not options.fast)
    if options.calibrate:
        _write(options.calibrate, measured.fitted_file(run, plan))
    data = as_data(plan, options.tokens) | {"measured": measured.comparison_data(run, plan)}
    if options.json == _TERMINAL:
        print(json.dumps(data, indent=1))
        return 0
    if options.json:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    print("\n\n".join([measured.comparison_text(run, plan), as_text(plan, options.tokens)]))
    for file in filter(None, (options.calibrate, options.json)):
        print(f"wrote {file}")
    return 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's options, and the configuration's flags."""
    own = parser()
    options, flags = parse_args(own, argv)
    if options.compare and (len(options.compare) + bool(options.config)) != 2:
        own.error("--compare needs two TOML files")
    if options.compare and not options.config:
        flags = [f"--job.config_file={options.compare[0]}", *flags]
    if bool(options.mtbf) != bool(options.storage):
        own.error("--mtbf and --storage need each other: what a failure costs depends on how long a save takes")
    if options.axes and not options.search:
        own.error("--axes needs --search")
    if options.from_run and (options.config or options.world or options.search or options.compare):
        own.error("--from-run takes the configuration and the number of ranks from the run; drop them and --search")
    if not (options.calibrate or options.from_run) and (missing := list(_missing(options, flags))):
        own.error("name\n" + "\n".join(f"  {line}" for line in missing))
    return options, flags


def _missing(options: argparse.Namespace, flags: list[str]) -> Iterator[str]:
    """What a plan needs and the command line doesn't say, with the choices."""
    if not flags:
        yield f"CONFIG.toml: one of {', '.join(shipped_configs())}, or a file"
    if options.world is None:
        yield "--world N: the number of GPUs"
    if options.hardware is None:
        yield f"--hardware NAME: one of {', '.join(load_hardware())}, or a TOML file (--calibrate FILE writes one)"


def _axes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in AXES]:
        raise argparse.ArgumentTypeError(f"no axis {unknown[0]!r} (there is {', '.join(AXES)})")
    return names


def _positive(text: str) -> float:
    try:
        if 0 < (number := float(text)) < float("inf"):
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


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
