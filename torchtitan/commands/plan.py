"""Predict the memory and speed of a configuration without a GPU, and what would lower its largest
costs.

Refuses what the trainer refuses, in the same words. Exits with 1 if the plan does not fit.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchtitan.config.load.command_line import flag_text
from torchtitan.tools.planner import calibrate
from torchtitan.tools.planner.cpu import find_or_measure
from torchtitan.tools.planner.options import options_of, parse
from torchtitan.tools.planner.page import page, scaling
from torchtitan.tools.planner.planner import find_layouts, make_plan, nothing_fits, planned_toml
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import (
    as_data,
    as_text,
    comparison,
    run_of,
    search_data,
    search_table,
    show_rounded,
)
from torchtitan.tools.planner.sizes import compare_sizes, sizes_data, sizes_table
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output

_TERMINAL = "-"
_SEQ_LEN = 4096
"""Tokens per row of a model from Hugging Face, unless a flag says otherwise."""
Section = tuple[str, Any, str]
"""A section of the output besides the plan: its key in the JSON, its data, and its text."""


@dataclass
class Prediction:
    """The plan to show, and the sections before it."""

    plan: Plan
    flags: list[str]
    """The configuration that it was made from."""
    sections: list[Section]
    hardware_file: str = ""
    """Hardware fitted to a run, in TOML."""


def parser() -> argparse.ArgumentParser:
    return options_of(__doc__)


def main(argv: list[str]) -> int:
    options, flags = parse(parser(), argv or ["--help"])
    prediction = _of_run(options, flags) if options.from_run else _of_flags(options, flags)
    plan = prediction.plan
    cost = list(_cost(options, plan))
    toml = planned_toml(plan, prediction.flags)
    data = as_data(plan, options.tokens) | {
        "command": shlex.join(["torchtitan", "plan", *argv]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "toml": toml,
    }
    data |= {key: section for key, section, _ in prediction.sections + cost}
    _write(_files(options, prediction, toml=toml, data=data))
    if options.json == _TERMINAL:
        print(_json(data), end="")
    else:
        before, after = ([text for *_, text in group] for group in (prediction.sections, cost))
        print("\n\n".join([*before, as_text(plan, options.tokens), *after]))
        for option in ("write", "json", "html", "output"):
            if file := getattr(options, option):
                print(f"wrote {file}")
    return 0 if plan.fits or options.from_run else 1


def _of_run(options: argparse.Namespace, flags: list[str]) -> Prediction:
    """The plan of a run beside its measurements, and the hardware fitted to them."""
    run = calibrate.read_run(options.from_run)
    name = options.hardware or calibrate.hardware_of(run)
    flags = [calibrate.config_flag(run), *flags]
    plan = make_plan(flags, run.world, find_or_measure(name))
    section = calibrate.comparison_data(run, plan), calibrate.comparison_text(run, plan)
    hardware = calibrate.fitted_file(run, plan) if options.output else ""
    return Prediction(plan, flags, [("measured", *section)], hardware_file=hardware)


def _of_flags(options: argparse.Namespace, flags: list[str]) -> Prediction:
    """The plan of the configured or best layout on the given or best number of ranks."""
    if options.config and is_hugging_face(Path(options.config)):
        flags = _flags_of_model(Path(options.config), flags[1:])
    hardware = find_or_measure(options.hardware)
    sections: list[Section] = []
    world = options.world
    if world is None:
        sizes = compare_sizes(flags, hardware, tokens=options.tokens, days=options.days)
        plan = sizes.pick.plan
        world = sizes.pick.world
        price = options.money
        sections.append(("sizes", sizes_data(sizes, price), sizes_table(sizes, price)))
    elif not options.search:
        plan = make_plan(flags, world, hardware)
    if options.search:
        result = find_layouts(flags, world, hardware)
        if not result.best:
            raise UserError(
                f"--search: {nothing_fits(result, world, hardware)}; use more ranks, a smaller "
                "training.seq_len, more training.loss_chunks, optimizer.state_dtype bfloat16, or "
                "training.enable_cpu_offload"
            )
        sections.append(("search", search_data(result), search_table(result)))
        plan = result.best[0].plan
    if options.compare:
        # the last file takes precedence
        other_flags = [*flags, f"--job.config_file={options.compare[-1]}"]
        other = make_plan(other_flags, world, hardware)
        sections.append(("compared", as_data(other, options.tokens), comparison(plan, other)))
    return Prediction(plan, flags, sections)


def _cost(options: argparse.Namespace, plan: Plan) -> Iterator[Section]:
    """The run's cost, if there is a price."""
    if price := options.money:
        cost = price * run_of(plan, options.tokens).gpu_hours
        yield "cost", cost, f"Cost: {show_rounded(cost)} at {price:g} per GPU-hour"


def _files(
    options: argparse.Namespace, prediction: Prediction, *, toml: str, data: dict[str, Any]
) -> dict[str, str]:
    """The files that options ask for, by path."""
    plan = prediction.plan
    files = {}
    if options.output:
        files[options.output] = prediction.hardware_file
    if options.write:
        files[options.write] = toml
    if options.json and options.json != _TERMINAL:
        files[options.json] = _json(data)
    if options.html:
        page_data = data | {"scaling": scaling(plan)}
        files[options.html] = page(page_data)
        files[str(Path(options.html).with_suffix(".json"))] = _json(page_data)
    return files


def is_hugging_face(path: Path) -> bool:
    """Whether a configuration is a Hugging Face folder or its `config.json`."""
    return path.is_dir() or path.suffix == ".json"


def _flags_of_model(path: Path, flags: list[str]) -> list[str]:
    """Flags that train a Hugging Face model, then the command line's, which take precedence."""
    from torchtitan.tools.launch.model_choice import hugging_face_model

    model = hugging_face_model(path)
    settings = {
        "job.description": model.name,
        "model.name": model.spec.name,
        "model.flavor": model.flavor,
        "training.seq_len": min(_SEQ_LEN, model.args.max_seq_len),
        "training.local_batch_size": 1,
        "compile.enable": True,
    }
    if model.folder and (model.folder / "tokenizer.json").exists():
        settings["model.hf_assets_path"] = str(model.folder)
    settings |= {f"model.overrides.{key}": value for key, value in model.overrides.items()}
    return [f"--{key}={flag_text(key, value)}" for key, value in settings.items()] + flags


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"


def _write(files: dict[str, str]) -> None:
    write_output({Path(file): content.encode() for file, content in files.items()})
