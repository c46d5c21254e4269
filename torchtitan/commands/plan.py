"""Predict the memory and speed of a configuration without a GPU, and what would lower its largest
costs.

Refuses what the trainer refuses, in the same words. Exits with 1 if the plan does not fit.
"""

import argparse
import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtitan.config.load.command_line import flag_text
from torchtitan.tools.launch.trials import SCRIPT, fastest_trial, folder_of, trial_files
from torchtitan.tools.planner.budget import Failures, budget_of, budget_text
from torchtitan.tools.planner.corrections import correct, correction_note, hardware_called
from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.tools.planner.options import options_of, parse
from torchtitan.tools.planner.page import page, pictures, schedule_svg
from torchtitan.tools.planner.planner import make_plan, planned_toml
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import (
    as_data,
    as_text,
    comparison,
    origin,
    search_data,
    search_table,
)
from torchtitan.tools.planner.sizes import compare_sizes, sizes_data, sizes_table
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.wording import plural

_TERMINAL = "-"
_SEQ_LEN = 4096
"""Tokens per row of a model from Hugging Face, unless a flag says otherwise."""


def parser() -> argparse.ArgumentParser:
    return options_of(__doc__)


def main(argv: list[str]) -> int:
    options, flags = parse(parser(), argv or ["--help"])
    if options.from_run:
        return _compare_run(options, flags)
    if options.adopt:
        return _adopt(options)
    hardware = hardware_called(options.hardware)
    if options.config and is_hugging_face(Path(options.config)):
        flags = _flags_of_model(Path(options.config), flags[1:])
    sizes = None
    if options.world is None:
        sizes = compare_sizes(
            flags, hardware, axes=options.axes, tokens=options.tokens, days=options.days
        )
    world = sizes.chosen.world if sizes else options.world
    if sizes and not options.search:
        plan, layouts = sizes.chosen.plan, None
    else:
        plan, layouts = make_plan(
            flags, world, hardware, searching=options.search, axes=options.axes
        )
    plan = replace(plan, notes=(*plan.notes, *correction_note(options.hardware)))
    other = None
    if options.compare:
        other_flags = [*flags, f"--job.config_file={options.compare[-1]}"]  # the last file counts
        other, _ = make_plan(other_flags, options.world, hardware)
    if options.write:
        _write(options.write, planned_toml(plan, flags))
    trials: list[Plan] = []
    if options.trials and layouts:
        best = [proposal.plan for proposal in layouts.best if proposal.plan.fits]
        trials = best[: options.trials]
    if trials:
        write_output(trial_files(trials, flags, Path(options.write)))
    data: dict[str, Any] = as_data(plan, options.tokens) | origin(argv, planned_toml(plan, flags))
    failures = (
        Failures(options.mtbf, options.storage * 1e9, options.restart) if options.mtbf else None
    )
    budget = (
        budget_of(plan, options.tokens, failures, options.money)
        if failures or options.money
        else None
    )
    data |= {"budget": asdict(budget)} if budget else {}
    data |= {"search": search_data(layouts)} if layouts else {}
    data |= {"sizes": sizes_data(sizes, options.money)} if sizes else {}
    data |= {"compared": as_data(other, options.tokens)} if other else {}
    if options.json and options.json != _TERMINAL:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    if options.html:
        shown = data | pictures(
            plan, [proposal.plan for proposal in layouts.best] if layouts else []
        )
        shown |= {"scaling": data["sizes"]} if sizes else {}
        _write(options.html, page(shown))
        _write(str(Path(options.html).with_suffix(".json")), json.dumps(shown, indent=1) + "\n")
    if options.schedule_svg:
        if plan.workload.pipeline is None:
            raise UserError(
                "--schedule-svg: there is no pipeline; set parallelism.pipeline_parallel_degree, "
                "or drop it"
            )
        _write(options.schedule_svg, schedule_svg(plan))
    if options.json == _TERMINAL:
        print(json.dumps(data, indent=1))
    else:
        tables = [sizes_table(sizes, options.money)] if sizes else []
        tables += [search_table(layouts)] if layouts else []
        tables += [comparison(plan, other)] if other else []
        tables.append(as_text(plan, options.tokens))
        tables += [budget_text(budget, plan, failures, options.money)] if budget else []
        print("\n\n".join(tables))
        for option in ("write", "json", "html", "schedule_svg"):
            if file := getattr(options, option):
                print(f"wrote {file}")
        if trials:
            script = shlex.quote(str(folder_of(Path(options.write)) / SCRIPT))
            print(f"to measure {plural(len(trials), 'layout')} and adopt the fastest: sh {script}")
    return 0 if plan.fits else 1


def _adopt(options: argparse.Namespace) -> int:
    table, toml = fastest_trial(Path(options.adopt))
    write_output({Path(options.write): toml})
    print(f"{table}\nwrote {options.write}")
    return 0


def is_hugging_face(path: Path) -> bool:
    """Whether a configuration is a Hugging Face folder or its `config.json`."""
    return path.is_dir() or path.suffix == ".json"


def _flags_of_model(path: Path, flags: list[str]) -> list[str]:
    """Flags that train a Hugging Face model, followed by those of the command line, which count."""
    from torchtitan.tools.launch.model_choice import hugging_face_model

    model = hugging_face_model(path.expanduser())
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


def _compare_run(options: argparse.Namespace, flags: list[str]) -> int:
    from torchtitan.tools.planner import calibrate

    written: Path | None = None
    run = calibrate.read_run(Path(options.from_run))
    name = options.hardware or calibrate.hardware_of(run)
    plan = calibrate.plan_run(run, flags, hardware_called(name))
    if options.calibrate or not name.endswith(".toml"):
        # A correction replaces the one before; of a CPU, nothing else is known.
        table = None if name == CPU else find_hardware(name)
        start = calibrate.plan_run(run, flags, table) if table else plan
        if options.calibrate:
            _write(options.calibrate, calibrate.fitted_file(run, start))
        else:
            written = correct(name, calibrate.fitted_file(run, start, name))
    data = as_data(plan, options.tokens) | {"measured": calibrate.comparison_data(run, plan)}
    if options.json == _TERMINAL:
        print(json.dumps(data, indent=1))
        return 0
    if options.json:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    print("\n\n".join([calibrate.comparison_text(run, plan), as_text(plan, options.tokens)]))
    for file in filter(None, (options.calibrate, options.json)):
        print(f"wrote {file}")
    if written:
        print(f"wrote {written}: the next plans for {name} use it")
    return 0


def _write(file: str, content: str) -> None:
    write_output({Path(file): content.encode()})
