"""Predict the memory and speed of a configuration without a GPU, and what would lower its largest
costs.

Refuses what the trainer refuses, in the same words. Exits with 1 if the plan does not fit.
"""

import argparse
import dataclasses
import json
import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchtitan.config.load.command_line import flag_text
from torchtitan.tools.launch.model_choice import ModelChoice, hugging_face_model
from torchtitan.tools.planner import measurements
from torchtitan.tools.planner.cpu import find_or_measure
from torchtitan.tools.planner.options import options_of, parse
from torchtitan.tools.planner.planner import find_layouts, make_plan, nothing_fits, planned_toml
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import (
    as_data,
    as_text,
    page,
    run_of,
    search_data,
    search_table,
)
from torchtitan.tools.planner.sizes import compare_sizes
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output

_TERMINAL = "-"
_SEQ_LEN = 4096
"""Tokens per row of a model from Hugging Face, unless a flag says otherwise."""
_MANY_STEPS = 2_000_000
"""Steps that no run needs: its batch is too small."""


@dataclass
class Output:
    """The sections that the command prints, and their figures as data."""

    texts: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, data: Any, text: str) -> None:
        self.data[key] = data
        self.texts.append(text)


def parser() -> argparse.ArgumentParser:
    return options_of(__doc__)


def main(argv: list[str]) -> int:
    options, flags = parse(parser(), argv or ["--help"])
    output = Output()
    if options.from_run:
        run = measurements.read_run(options.from_run)
        hardware, _ = find_or_measure(options.hardware or measurements.hardware_of(run))
        flags = [measurements.config_flag(run), *flags]
        plan = make_plan(flags, run.world, hardware)
        output.add("measured", *measurements.comparison(run, plan))
    else:
        model = None
        if options.config and is_hugging_face(Path(options.config)):
            model = hugging_face_model(Path(options.config))
            flags = _flags_of_model(model, flags[1:])
        plan = _best_plan(options, flags, output, configured=model is None)
        plan = dataclasses.replace(plan, name=model.name if model else "")
    plan = _noting_steps(plan, options.tokens)
    output.texts.append(as_text(plan, options.tokens))
    toml = planned_toml(plan, flags)
    data = as_data(plan, options.tokens) | output.data
    data["command"] = shlex.join(["torchtitan", "plan", *argv])
    data["date"] = datetime.now(UTC).isoformat(timespec="minutes")
    data["toml"] = toml
    as_json = json.dumps(data, indent=1) + "\n"
    files: dict[str, str] = {}
    if options.write:
        files[options.write] = toml
    if options.html:
        files[options.html] = page(data)
        files[str(Path(options.html).with_suffix(".json"))] = as_json
    if options.json == _TERMINAL:
        print(as_json, end="")
    else:
        if options.json:
            files[options.json] = as_json
        print("\n\n".join(output.texts))
    write_output({Path(file): text.encode() for file, text in files.items()})
    if options.json != _TERMINAL:
        for file in files:
            print(f"wrote {file}")
    return 0 if plan.fits or options.from_run else 1


def _best_plan(
    options: argparse.Namespace, flags: list[str], output: Output, *, configured: bool
) -> Plan:
    """The plan of the configured or best layout on the given or best number of ranks.

    Args:
        configured: whether a file or flags state a layout.
    """
    hardware, _ = find_or_measure(options.hardware)
    world = options.world
    if world is None:
        sizes = compare_sizes(flags, hardware, tokens=options.tokens, days=options.days)
        output.add("sizes", sizes.data(), sizes.table())
        plan = sizes.pick.plan
        world = plan.workload.world
    elif not options.search:
        plan = make_plan(flags, world, hardware)
    if options.search:
        result = find_layouts(flags, world, hardware, show_configured=configured)
        if not result.best:
            raise UserError(
                f"--search: {nothing_fits(result, world, hardware)}; use more ranks, a smaller "
                "training.seq_len, more training.loss_chunks, optimizer.state_dtype bfloat16, or "
                "training.enable_cpu_offload"
            )
        output.add("search", search_data(result), search_table(result))
        plan = result.best[0].plan
    return plan


def _noting_steps(plan: Plan, tokens: float | None) -> Plan:
    """The plan with a note if its batch is far too small for `tokens`."""
    steps = run_of(plan, tokens).steps
    if steps < _MANY_STEPS:
        return plan
    return plan.noting(
        [
            f"{steps:,.0f} steps of {plan.workload.tokens_per_step:,} tokens are more than any "
            "run needs; raise training.global_batch_size"
        ]
    )


def is_hugging_face(path: Path) -> bool:
    """Whether a configuration is a Hugging Face folder or its `config.json`."""
    return path.is_dir() or path.suffix == ".json"


def _flags_of_model(model: ModelChoice, flags: list[str]) -> list[str]:
    """Flags that train a Hugging Face model, then the command line's, which take precedence."""
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
