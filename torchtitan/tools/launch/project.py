"""The files of a new project, checked as a whole before any is written."""

import shlex
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config import complete, load_config
from torchtitan.config.load.render import to_toml
from torchtitan.config.load.toml_file import HERE
from torchtitan.tools.launch.preparation import PreparationStep, has_held_out, preparation_commands
from torchtitan.tools.launch.recipe import as_flags, draft_settings, final_settings
from torchtitan.tools.launch.request import Choice, Choices, Request
from torchtitan.tools.launch.slurm_script import SlurmJob, check_words, job_name, script
from torchtitan.tools.planner.planner import without_missing_files
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import likelihood, run_of
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_output
from torchtitan.utils.wording import show_duration, show_rate, show_tokens

CONFIG = "train.toml"
SCRIPT = "train.sbatch"
HARDWARE = "hardware.toml"


@dataclass(frozen=True)
class Project:
    """Files of a new project, and the commands to run next."""

    folder: Path
    files: dict[str, str]
    preparation: list[PreparationStep]
    """Commands that make the data and tokenizer, in order."""
    steps: list[str]
    """Commands to run after preparation, with comments."""
    notes: list[str]


def existing(folder: Path) -> list[str]:
    """The files of a project that are in `folder` already."""
    return [name for name in (CONFIG, SCRIPT, HARDWARE) if (folder / name).exists()]


def make_project(
    request: Request, plan: Plan, command: str, slurm: Namespace | None, per_node: int
) -> Project:
    """The files of a project with a plan's layout.

    Args:
        command: command that makes the same project again.
        slurm: options of a Slurm script; None writes no script.
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
    key = "training.mixed_precision_param"
    if request.on_cpu:  # bfloat16 is the default, which the file leaves out
        notes.append(f"{key} is {settings[key].value}: {settings[key].why}")
    files = {CONFIG: text}
    if slurm is not None:
        files[SCRIPT] = _script(request, slurm, per_node)
    steps = _steps(request, slurm is not None, per_node)
    return Project(request.folder, files, preparation_commands(request), steps, notes=notes)


def _name_inside(setting: Choice, request: Request) -> str | None:
    """The value written with `{here}`, if it is a path in the project's folder; else None."""
    folder = request.path_inside("")
    value = str(setting.value)
    return HERE + value.removeprefix(folder) if value.startswith(f"{folder}/") else None


def _toml(request: Request, plan: Plan, settings: Choices, command: str) -> str:
    config = load_config(as_flags(settings)).config
    comments = {key: setting.why for key, setting in settings.items()}
    run = run_of(plan, float(config.training.steps * plan.workload.tokens_per_step))
    speed = plan.speed_range
    memory = plan.peak_range
    head = [
        f"{request.model.name} on {request.devices} x {request.hardware.description}. Written by:",
        f"  {command}",
        f"Planned: {show_rate(plan.tokens_per_second)} tokens/s per device ({show_rate(speed[0])} "
        f"to {show_rate(speed[1])}), {plan.peak_gib:.1f} of {request.hardware.usable_gib:.1f} GiB "
        f"({memory[0]:.1f} to {memory[1]:.1f}),",
        f"  chance to fit {likelihood(plan.chance_to_fit)}; {show_tokens(run.tokens)} tokens in "
        f"{show_duration(run.hours * 3600)}. 9 of 10 runs are within the ranges "
        "(docs/guides/plan.md).",
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


def _script(request: Request, slurm: Namespace, per_node: int) -> str:
    check_words(str(request.folder), [])
    nodes, ranks = nodes_of(request.devices, per_node)
    name = job_name(request.folder.absolute().name)
    return script(SlurmJob(name, (nodes, nodes), ranks, slurm, beside=True), CONFIG, [])


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


def _steps(request: Request, slurm: bool, per_node: int) -> list[str]:
    """Commands that train a prepared project."""
    steps = []
    config = shlex.quote(str(request.folder / CONFIG))
    if request.devices > 1:
        rehearse = f"torchtitan rehearse {config} --world {request.devices}"
        steps.append(f"{rehearse}  # optional: check that no rank can hang")
    nodes, ranks = nodes_of(request.devices, per_node)
    train = f"torchtitan train {config}"
    if slurm:
        steps.append(f"cd {shlex.quote(str(request.folder))} && sbatch {SCRIPT}")
    elif nodes > 1:
        steps.append(
            f"{train} --nnodes {nodes} --nproc-per-node {ranks} --rdzv-endpoint FIRST_NODE:29500"
            "  # on every node, with the same RDZV_SECRET"
        )
    elif request.on_cpu:
        steps.append(train)
    else:
        steps.append(f"{train} --nproc-per-node {ranks}")
    return steps


def write(project: Project) -> None:
    """Write all files, or none.

    Raises:
        UserError: the folder can't be written to.
    """
    write_output({project.folder / name: text.encode() for name, text in project.files.items()})


def summary(project: Project) -> str:
    """Message that lists the written files, and notes."""
    wrote = f"Wrote {', '.join(str(project.folder / name) for name in project.files)}"
    notes = [f"note: {note}" for note in project.notes]
    return "\n".join([wrote, *notes])
