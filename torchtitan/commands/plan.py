"""Plan a run without a GPU: `torchtitan plan X.toml --world 512 [--section.key value ...] [options]`.

Prints memory by part against the limit, speed, and the largest costs with what would change each. Refuses what the
trainer refuses, in the same words. Exits with 1 if the plan doesn't fit. More options:
  --search             find the fastest layout of this model and batch, and plan that
  --write FILE         write the planned configuration as a TOML file that runs as it is
  --compare A B        plan two TOML files, and show them side by side
  --tokens N           tokens to train on, as 15e12. Default: those of training.steps
  --fast               compute the memory of the answer instead of tracing it
  --json FILE          the plan as JSON; - for the terminal, and nothing else there
  --html FILE          a page with pictures, and its figures as JSON beside it
  --schedule-svg FILE  the pipeline's schedule as a picture
  --hardware NAME      a name of torchtitan/utils/hardware.toml, or a TOML file. Default: h100-sxm
  --calibrate FILE     measure this machine, and write it as a file for --hardware
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

from torchtitan.config import load_config, resolve
from torchtitan.config.derive import layout_name, replace
from torchtitan.config.render import to_toml
from torchtitan.config.schema import Config
from torchtitan.plan.answers import Answer, answer, report, text, traced
from torchtitan.plan.hardware import Hardware, find_hardware
from torchtitan.plan.page import page, pictures, schedule_svg
from torchtitan.plan.search import Found, search
from torchtitan.plan.workload import Workload
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.text import aligned

_FILES = ("--write", "--compare", "--json", "--html", "--schedule-svg", "--calibrate")
_CONFIG_FLAGS = ("--job.config_file", "--config", "--job.config-file")


@dataclass
class Options:
    """This tool's own options."""

    world: int = 1
    hardware: str = "h100-sxm"
    tokens: float | None = None
    search: bool = False
    fast: bool = False
    files: dict[str, Path] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    """Flags of the configuration."""


def main(argv: list[str]) -> int:
    if argv in ([], ["--help"], ["-h"]):
        print(__doc__)
        return 0
    options = parse(argv)
    if file := options.files.get("--calibrate"):
        from torchtitan.plan.calibrate import calibrate

        _write(file, calibrate())
        print(f"Measured this machine: {file}; plan for it with --hardware {file}")
        return 0
    hardware = find_hardware(options.hardware)
    made, found = plan(options.rest, options.world, hardware, searching=options.search, tracing=not options.fast)
    data, said = report(made, options.tokens), []
    if found:
        data["search"] = found.summary()
        said += [_table(found), ""]
    if file := options.files.get("--compare"):
        other, _ = plan(_instead(options.rest, file), options.world, hardware, tracing=not options.fast)
        data["compared"] = report(other, options.tokens)
        said += [_side_by_side(data, data["compared"]), ""]
    if file := options.files.get("--write"):
        _write(file, _as_toml(made, data, options))
    as_json = json.dumps(data, indent=1)
    if (file := options.files.get("--json")) and str(file) != "-":
        _write(file, f"{as_json}\n")
    if file := options.files.get("--html"):
        data |= pictures(made)
        _write(file, page(data))
        _write(file.with_suffix(".json"), json.dumps(data, indent=1) + "\n")
    if file := options.files.get("--schedule-svg"):
        if made.time.timeline is None:
            raise UserError(
                "--schedule-svg: there is no pipeline; set parallelism.pipeline_parallel_degree, or leave it out"
            )
        _write(file, schedule_svg(made.time.timeline))
    said += [text(data), *(f"{option}: {file}" for option, file in options.files.items() if option != "--compare")]
    print(as_json if options.files.get("--json") == Path("-") else "\n".join(said))
    return 0 if made.fits else 1


def plan(
    argv: list[str], world: int, hardware: Hardware, *, searching: bool = False, tracing: bool = False
) -> tuple[Answer, Found | None]:
    """The plan for a configuration, or for the best that a search finds from it."""
    resolved = resolve(argv, world)
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    here, notes = _without_missing_files(resolved.config)
    checked = preflight(here, output=False)
    if not searching:
        made, found = answer(Workload(resolved.config, checked.args, checked.stages), checked.spec, hardware), None
        made = traced(made, here) if tracing else made
    else:
        found = search(resolved.config, checked.spec, checked.args, world, hardware)
        if not found.best:
            raise UserError(
                f"--search: none of {found.seen} legal configurations on {world} ranks fits into the "
                f"{hardware.usable_gib:.0f} GiB of {hardware.name}; use more ranks, a smaller training.seq_len, more "
                "training.loss_chunks, or optimizer.state_dtype bfloat16"
            )
        made = _first_that_fits(found, tracing)
    made.notes.extend(notes)
    return made, found


def _first_that_fits(found: Found, tracing: bool) -> Answer:
    """The fastest proposal whose memory, traced, fits too; of the first three."""
    made = []
    for proposal in found.best[:3]:
        here, _ = _without_missing_files(proposal.config)
        preflight(here, output=False)
        made.append(traced(proposal, here) if tracing else proposal)
        if made[-1].fits:
            return made[-1]
    return made[0]


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
        if path and path != instead and not glob(str(Path(path).expanduser()), recursive=True):
            config = replace(config, key, instead)
            notes.append(f"{key} {path!r} is not here: a plan doesn't need it, the run will")
    return config, notes


def _instead(argv: list[str], file: Path) -> list[str]:
    """The same flags with another TOML file."""
    words, kept = iter(argv), ["--job.config_file", str(file)]
    for word in words:
        if word in _CONFIG_FLAGS:
            next(words, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in _CONFIG_FLAGS)):
            kept.append(word)
    return kept


def _as_toml(made: Answer, data: dict[str, Any], options: Options) -> str:
    """The configuration as written by the user, with the plan's layout."""
    config, planned = load_config(options.rest).config, made.config
    same = {key: getattr(planned.training, key) for key in ("local_batch_size", "global_batch_size")}
    training = config.training.model_copy(update=same)
    parts = {"parallelism": planned.parallelism, "activation_checkpoint": planned.activation_checkpoint}
    config = config.model_copy(update=parts | {"training": training})
    memory, time = data["memory"], data["time"]
    head = [
        f"# {data['model']} on {data['world']} x {made.hardware.description}.",
        f"# Planned: {time['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU, {memory['peak_gib']:.1f} GiB.",
    ]
    return "\n".join([*head, "", to_toml(config, only_changed=True)])


def _write(file: Path, content: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content.encode())
    except OSError as error:
        raise UserError(f"can't write {file}: {error.strerror or error}") from None


# ---- tables


def _table(found: Found) -> str:
    rows = [["layout", "batch", "schedule", "checkpointing", "tokens/s/GPU", "GiB"]]
    for entry in found.summary()["best"]:
        layout = layout_name(entry["layout"])
        batch = f"{entry['local_batch_size']} x {entry['accumulation']}"
        schedule = f"{entry['schedule']}, {entry['microbatches']} microbatches" if entry["schedule"] else "-"
        speed = f"{entry['tokens_per_second_per_gpu']:,.0f}"
        rows.append([layout, batch, schedule, entry["activation_checkpointing"], speed, f"{entry['peak_gib']:.1f}"])
    return f"Best of {found.seen:,} legal configurations:\n" + aligned(rows)


def _side_by_side(a: dict[str, Any], b: dict[str, Any]) -> str:
    rows = [["", "this", "compared"]]
    rows += [[axis, str(a["layout"][axis]), str(b["layout"][axis])] for axis in a["layout"]]
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "model": lambda r: r["model"],
        "checkpointing": lambda r: r["activation_checkpointing"],
        "peak GiB": lambda r: f"{r['memory']['peak_gib']:.1f}",
        "fits": lambda r: str(r["memory"]["fits"]),
        "tokens/s/GPU": lambda r: f"{r['time']['tokens_per_second_per_gpu']:,.0f}",
        "MFU": lambda r: "-" if r["time"]["mfu"] is None else f"{r['time']['mfu']:.1%}",
        "step s": lambda r: f"{r['time']['step_s']:.3g}",
    }
    rows += [[name, figure(a), figure(b)] for name, figure in figures.items()]
    parts = dict.fromkeys([*a["time"]["parts_s"], *b["time"]["parts_s"]])
    rows += [[f"{p}, s", *(f"{r['time']['parts_s'].get(p, 0.0):.3g}" for r in (a, b))] for p in parts]
    return aligned(rows)


# ---- arguments


def parse(argv: list[str]) -> Options:
    """Take this tool's own options out of the arguments.

    Raises:
        ConfigError: an option without its value, or with a wrong one.
    """
    options, problems = Options(), []
    takes: dict[str, Callable[[str], Any]] = {"--world": _count, "--hardware": str, "--tokens": _amount}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--search", "--fast"):
            setattr(options, word[2:], True)
        elif word == "--compare" and len(words) > 1 and not any(word.startswith("--") for word in words[:2]):
            options.rest += ["--job.config_file", words.pop(0)]
            options.files[word] = Path(words.pop(0))
        elif name in takes or name in _FILES:
            if not equals and words and not words[0].startswith("--"):
                value = words.pop(0)
            try:
                if not value:
                    raise ValueError("needs a value")
                if name in _FILES:
                    options.files[name] = Path(value)
                else:
                    setattr(options, name[2:], takes[name](value))
            except ValueError as error:
                problems.append(f"{name}: {error}")
        elif not options.rest and not word.startswith("-"):
            options.rest += ["--job.config_file", word]
        else:
            options.rest.append(word)
    if "--compare" in options.files and not set(_CONFIG_FLAGS) & {word.partition("=")[0] for word in options.rest}:
        problems.append("--compare: needs two TOML files")
    if problems:
        raise ConfigError(problems)
    return options


def _count(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{value!r} is not a number of ranks")
    return int(value)


def _amount(value: str) -> float:
    try:
        if (amount := float(value)) > 0:
            return amount
    except ValueError:
        pass
    raise ValueError(f"{value!r} is not a number of tokens, as 15e12")
