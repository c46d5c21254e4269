"""Plan a run without a GPU: `python -m torchtitan.tools.plan X.toml --world 512 --hardware h100-sxm [--section.key value ...]`.

Prints memory by part against the limit, speed, and the largest costs with what would change each. Refuses what the
trainer refuses, with the same words. More options:
  --search             find the fastest layout for this model, batch and world, and plan that
  --write FILE         write the planned configuration as a TOML file that runs as it is
  --compare A B        plan two files side by side
  --tokens N           tokens to train on, as 15e12. Default: those of training.steps
  --fast               closed forms only: don't trace the memory of the answer
  --json FILE          the answer as JSON
  --html FILE          a page with pictures, and its figures as JSON beside it
  --schedule-svg FILE  the pipeline's schedule as a picture
  --hardware NAME      a name of torchtitan/plan/hardware.toml, or a TOML file. Default: h100-sxm
  --calibrate FILE     measure this machine, and write it as a file for --hardware
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config import resolve
from torchtitan.config.derive import replace
from torchtitan.config.schema import Config
from torchtitan.plan.answers import Answer, answer, report, text
from torchtitan.plan.hardware import find_hardware
from torchtitan.plan.workload import Workload
from torchtitan.trainer.preflight import preflight
from torchtitan.utils.errors import ConfigError, run_main

_FILES = ("--write", "--json", "--html", "--schedule-svg", "--calibrate")


@dataclass
class Options:
    """This tool's own options."""

    overrides: list[str] = field(default_factory=list)
    world: int = 1
    hardware: str = "h100-sxm"
    tokens: float | None = None
    search: bool = False
    fast: bool = False
    compare: tuple[str, str] | None = None
    files: dict[str, str] = field(default_factory=dict)


def plan(options: Options, argv: list[str]) -> Answer:
    """The answer for one configuration."""
    resolved = resolve(argv, options.world)
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    here, notes = _without_missing_files(resolved.config)
    found = preflight(here, output=False)
    workload = Workload(resolved.config, found.args, found.stages)
    made = answer(workload, found.spec, find_hardware(options.hardware))
    made.notes.extend(notes)
    return made


def _without_missing_files(config: Config) -> tuple[Config, list[str]]:
    """A plan is made on a laptop, for a cluster that has the tokenizer and the data."""
    notes = []
    known: list[tuple[str, str | None, Any]] = [
        ("model.hf_assets_path", config.model.hf_assets_path, Config().model.hf_assets_path),
        ("training.dataset_path", config.training.dataset_path, None),
        ("validation.dataset_path", config.validation.dataset_path, None),
        ("checkpoint.initial_load_path", config.checkpoint.initial_load_path, None),
    ]
    for key, path, instead in known:
        if path and path != instead and "*" not in path and not Path(path).expanduser().exists():
            config = replace(config, key, instead)
            notes.append(f"{key} {path!r} is not here; a plan doesn't need it, the run will")
    return config, notes


def main(argv: list[str]) -> int:
    if argv in ([], ["--help"], ["-h"]):
        print(__doc__)
        return 0
    options = parse(argv)
    made = plan(options, options.overrides)
    data = report(made, options.tokens)
    print(text(data))
    if file := options.files.get("--json"):
        _write(file, json.dumps(data, indent=1) + "\n")
    return 0 if made.fits else 1


def _write(file: str, content: str) -> None:
    Path(file).write_text(content)


def parse(argv: list[str]) -> Options:
    """Take this tool's own options out of the arguments.

    Raises:
        ConfigError: an option without its value, or with a wrong one.
    """
    options, problems = Options(), []
    words = [part for word in argv for part in _split(word)]
    takes: dict[str, Callable[[str], Any]] = {"--world": _count, "--hardware": str, "--tokens": float}
    while words:
        word = words.pop(0)
        if word in ("--search", "--fast"):
            setattr(options, word[2:], True)
        elif word == "--compare":
            options.compare = (words.pop(0), words.pop(0)) if len(words) > 1 else None
            if not options.compare:
                problems.append("--compare: needs two TOML files")
        elif word in takes or word in _FILES:
            value = words.pop(0) if words and not words[0].startswith("--") else ""
            try:
                if word in _FILES:
                    options.files[word] = str(Path(value)) if value else _missing()
                else:
                    setattr(options, word[2:], takes[word](value) if value else _missing())
            except ValueError as error:
                problems.append(f"{word}: {error}")
        elif not options.overrides and not word.startswith("-"):
            options.overrides += ["--job.config_file", word]
        else:
            options.overrides.append(word)
    if problems:
        raise ConfigError(problems)
    return options


def _split(word: str) -> list[str]:
    """`--world=8` as two words; the configuration's flags stay as they are."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and (name in _FILES or name in ("--world", "--hardware", "--tokens")) else [word]


def _missing() -> Any:
    raise ValueError("needs a value")


def _count(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{value!r} is not a number of ranks")
    return int(value)


if __name__ == "__main__":
    sys.exit(run_main(main))
