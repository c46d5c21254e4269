"""The files of a new project, checked as a whole before any is written."""

import math
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config import complete, load_config
from torchtitan.config.derive import layout_name
from torchtitan.config.load.render import to_toml
from torchtitan.config.load.toml_file import HERE
from torchtitan.tools.launch.preparation import has_held_out, preparation_commands
from torchtitan.tools.launch.recipe import as_flags, draft_settings, final_settings, steps_of
from torchtitan.tools.launch.request import Choice, Choices, Request
from torchtitan.tools.planner.planner import without_missing_files
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.proposals import Proposal
from torchtitan.tools.planner.render import likelihood, run_of
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.wording import show_duration, show_epochs, show_rate, show_tokens

CONFIG = "train.toml"
HARDWARE = "hardware.toml"
_BYTES_PER_TOKEN = 4
"""Assumed of text that nothing has read yet."""


@dataclass(frozen=True)
class Project:
    """Files of a new project, and the commands to run next."""

    folder: Path
    files: dict[str, str]
    figures: list[str]
    """Lines with the plan's figures."""
    steps: list[str]
    """Commands that make the data and tokenizer, then train, with comments."""
    notes: list[str]


def existing(folder: Path) -> list[str]:
    """The files of a project that are in `folder` already."""
    return [name for name in (CONFIG, HARDWARE) if (folder / name).exists()]


def make_project(request: Request, plan: Plan, command: str, per_node: int) -> Project:
    """The files of a project with a plan's layout.

    Args:
        command: command that makes the same project again.
        per_node: devices per node.

    Raises:
        UserError: the trainer would refuse the configuration.
    """
    settings = final_settings(draft_settings(request), plan, request)
    portable = {
        key: Choice(name, setting.why)
        for key, setting in settings.items()
        if (name := _name_inside(setting, request))
    }
    inside = {key: settings[key] for key in portable}
    text = _toml(request, plan, settings | portable, command)
    notes = _validate_text(text, request, inside)
    if request.corpus and not has_held_out(request):
        notes.append("too few documents to hold some out; nothing is validated")
    tokens = steps_of(plan, request) * plan.workload.tokens_per_step
    if request.data.size and tokens > (estimate := request.data.size / _BYTES_PER_TOKEN):
        notes.append(show_epochs(tokens, estimate))
    key = "training.mixed_precision_param"
    if request.on_cpu:  # bfloat16 is the default, which the file leaves out
        notes.append(f"{key} is {settings[key].value}: {settings[key].why}")
    steps = preparation_commands(request) + _training(request, per_node)
    return Project(request.folder, {CONFIG: text}, _figures(plan, request), steps, notes)


def _name_inside(setting: Choice, request: Request) -> str | None:
    """The value written with `{here}`, if it is a path in the project's folder; else None."""
    folder = request.path_inside("")
    value = str(setting.value)
    return HERE + value.removeprefix(folder) if value.startswith(f"{folder}/") else None


def _figures(plan: Plan, request: Request) -> list[str]:
    """Lines with a plan's figures for the requested run."""
    run = run_of(plan, float(steps_of(plan, request) * plan.workload.tokens_per_step))
    (slow, fast), (least, most) = plan.speed_range, plan.peak_range
    return [
        f"Planned: {show_rate(plan.tokens_per_second)} tokens/s per device ({show_rate(slow)} to "
        f"{show_rate(fast)}), {plan.peak_gib:.1f} of {plan.hardware.usable_gib:.1f} GiB "
        f"({least:.1f} to {most:.1f}),",
        f"  chance to fit {likelihood(plan.chance_to_fit)}; {show_tokens(run.tokens)} tokens in "
        f"{show_duration(run.hours * 3600)}.",
        "9 of 10 runs are within the ranges (docs/guides/plan.md).",
    ]


def _toml(request: Request, plan: Plan, settings: Choices, command: str) -> str:
    config = load_config(as_flags(settings)).config
    comments = {key: setting.why for key, setting in settings.items()}
    head = [
        f"{request.model.name} on {request.devices} x {request.hardware.description}. Written by:",
        f"  {command}",
        *_figures(plan, request),
        "Only what differs from the defaults is here; `torchtitan config FILE --explain` "
        "shows every value.",
    ]
    body = to_toml(config, only_changed=True, comments=comments)
    # a hardware file may hold any text
    lines = ("".join(c if c.isprintable() else " " for c in line) for line in head)
    return "".join(f"# {line}\n" for line in lines) + "\n" + body.rstrip() + "\n"


def _validate_text(text: str, request: Request, inside: Choices) -> list[str]:
    """Check a configuration file as the trainer would on its devices.

    Args:
        inside: settings that are paths in the project's folder, which may not exist yet.

    Returns:
        Notes on files that are missing on this machine.

    Raises:
        ConfigError: the trainer would refuse it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, CONFIG)
        file.write_text(text)
        loaded = load_config([f"--config={file}", *as_flags(inside)])
        config = complete(loaded, request.devices, check=False).config
    readable, notes = without_missing_files(config)
    device = request.hardware.accelerator
    preflight(readable, whole=config, world=request.devices, device=device, output=False)
    return [
        note.replace("the plan doesn't need it, the run will", "the run will need it")
        for note in notes
        if note.split()[0] not in inside  # commands make it
    ]


def nodes_of(devices: int, per_node: int) -> tuple[int, int]:
    """Number of nodes, and ranks per node.

    Raises:
        UserError: the devices don't fill whole nodes.
    """
    if devices > per_node and devices % per_node:
        raise UserError(
            f"--devices: {devices} don't fill nodes of {per_node}; give a multiple of "
            f"{per_node}, or --gpus-per-node"
        )
    return max(1, devices // per_node), min(devices, per_node)


def _training(request: Request, per_node: int) -> list[str]:
    """Commands that train a prepared project."""
    config = shlex.quote(str(request.folder / CONFIG))
    nodes, ranks = nodes_of(request.devices, per_node)
    steps = []
    if request.devices > 1:
        rehearse = f"torchtitan rehearse {config} --world {request.devices}"
        steps.append(f"{rehearse}  # optional: check that no rank can hang")
    train = f"torchtitan train {config}"
    if nodes > 1:
        minutes = math.ceil(60 * (request.hours or 0))
        time = f" --time {minutes // 60}:{minutes % 60:02}:00" if minutes else ""
        steps.append(
            f"torchtitan submit {config} --gpus-per-node {ranks}{time}  # a Slurm job for {nodes} "
            "nodes"
        )
    else:
        steps.append(train if request.on_cpu else f"{train} --nproc-per-node {ranks}")
    return steps


def write(project: Project) -> None:
    """Write all files, or none.

    Raises:
        UserError: the folder can't be written to.
    """
    write_output({project.folder / name: text.encode() for name, text in project.files.items()})


def summary(project: Project, layout: Proposal) -> str:
    """Message with the layout, the written files, notes and the commands to run next."""
    name = layout_name(layout.plan.layout)
    lines = [
        f"{name}: {layout.why}",
        *project.figures,
        "",
        f"Wrote {', '.join(str(project.folder / name) for name in project.files)}",
        *(f"note: {note}" for note in project.notes),
        "",
        "Next:",
        *(f"  {step}" for step in project.steps),
    ]
    return "\n".join(lines)
