"""Start a project: a configuration with the reason for each value, and the command or Slurm job
that trains it.

Asks for values that no flag sets. Plans every legal layout for the hardware, shows the three best,
and writes a complete file. Configuration flags take precedence over its choices.

    torchtitan init --model llama3/8B --data c4 --hardware h100-sxm --devices 64 --tokens 160B
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from torchtitan.commands import command_module
from torchtitan.config.load.command_line import config_flags, show_help, split_args
from torchtitan.tools.launch import project as projects
from torchtitan.tools.launch import questions
from torchtitan.tools.launch.ask import Asker, discard_typed
from torchtitan.tools.launch.layout_choice import best_layouts, table
from torchtitan.tools.launch.questions import local_gpus
from torchtitan.tools.launch.request import Choice, Choices, Request
from torchtitan.tools.launch.slurm_script import add_job_options, check_words
from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import load_hardware
from torchtitan.utils.argument_types import command_parser, count
from torchtitan.utils.errors import ConfigError, UserError


def parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "init", __doc__, usage="torchtitan init [FOLDER] [options] [--section.key value ...]"
    )
    add = parser.add_argument
    add("folder", nargs="?", metavar="FOLDER", help="of the project (named after the model)")
    add(
        "--model",
        metavar="FAMILY/SIZE|FOLDER",
        help="a size of a family, or a local Hugging Face folder",
    )
    add(
        "--data",
        metavar="NAME|PATH",
        help="demo, c4, a file or folder, or org/name:config@split of the hub",
    )
    add(
        "--hardware",
        metavar="NAME",
        help=f"{CPU} (this machine's), {', '.join(load_hardware())}, or a TOML file",
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--devices", metavar="N", help="number of GPUs, on all nodes together")
    number.add_argument("--nodes", type=count, metavar="N", help="or of nodes")
    add(
        "--gpus-per-node",
        type=count,
        metavar="N",
        help="GPUs that a launcher starts ranks on (the hardware's)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", metavar="N", help="tokens to train on, as 160B or 1.6e11")
    length.add_argument("--hours", metavar="N", help="or hours to train")
    add(
        "--seq-len",
        metavar="N",
        help="tokens of a row (256 for debug models, 1024 to 4096 for larger ones)",
    )
    add("--choose", type=count, metavar="N", help="which of the layouts shown (1)")
    add(
        "--slurm",
        action=argparse.BooleanOptionalAction,
        help="write a Slurm job (if there are several nodes)",
    )
    add(
        "--prepare",
        action=argparse.BooleanOptionalAction,
        help="run the commands that make the tokenizer, the tokens and the held-out part (a "
        "terminal asks; else, and with --yes, they are only printed)",
    )
    add("--yes", action="store_true", help="take all defaults instead of asking")
    add("--force", action="store_true", help="overwrite the files of an earlier project")
    add_job_options(parser)
    return parser


def main(argv: list[str]) -> int:
    show_help(argv, whole=False)
    words, flags = split_args(argv)
    options = parser().parse_intermixed_args(words)
    check_words("", argv)  # flags become a comment in the file
    settings = _flag_settings(flags)
    if options.folder:
        _check_folder(Path(options.folder), force=options.force)
    asker = Asker(interactive=sys.stdin.isatty() and sys.stdout.isatty(), accept=options.yes)
    request, measured = _ask(options, asker, settings)
    per_node = options.gpus_per_node or request.hardware.devices_per_host
    if request.on_cpu and not request.data.is_here:
        raise ConfigError([f"--data: no file or folder {request.data.path}"])
    if options.prepare and not request.data.is_here:
        raise ConfigError(
            [
                f"--prepare: this machine has no {request.data.path}; without --prepare, `init` "
                "prints the commands to run where the data is"
            ]
        )
    if request.on_cpu and options.slurm:
        raise ConfigError(["--slurm: a job asks for GPUs; choose other hardware, or drop it"])
    nodes, _ = projects.nodes_of(request.devices, per_node)
    _check_folder(request.folder, force=options.force)
    print("Searching for the best layouts ...", file=sys.stderr)
    proposals, seen = best_layouts(request)
    discard_typed()
    print(table(proposals, seen, request))
    number = options.choose or asker.choose("\nWhich layout?", len(proposals))
    if number > len(proposals):
        raise ConfigError([f"--choose: {number}, but the layouts are 1 to {len(proposals)}"])
    slurm = options if (nodes > 1 if options.slurm is None else options.slurm) else None
    command = _command(request, options, number, flags)
    project = projects.make_project(
        request, proposals[number - 1].plan, command, slurm, per_node=per_node
    )
    if measured:
        project.files[projects.HARDWARE] = measured
    projects.write(project)
    print(f"\n{projects.summary(project)}")
    _finish(project, request, options.prepare, asker)
    return 0


def _finish(
    project: projects.Project, request: Request, prepare: bool | None, asker: Asker
) -> None:
    """Prepare the data if asked to, and print the commands that remain.

    Args:
        prepare: None asks, if the terminal is interactive.

    Raises:
        UserError: a command failed. It is the first of the printed commands, as after Ctrl-C.
    """
    remaining = project.preparation.copy()
    try:
        if prepare is None and remaining and request.data.is_here:
            default = "yes" if asker.interactive else "no"
            question = questions.prepare_question(remaining, request.data, default)
            prepare = asker.answer(question, None)
        while prepare and remaining:
            print(f"\n{remaining[0]}", flush=True)
            _run(*remaining[0].words)
            del remaining[0]
    finally:
        print("\nNext:", *remaining, *project.steps, sep="\n  ", flush=True)


def _run(program: str, command: str, *words: str) -> None:
    """Run a command of this package in this process, or another program.

    Raises:
        UserError: it failed.
    """
    try:
        if program == "torchtitan":
            command_module(command).run(list(words))
        elif shutil.which(program) is None:
            raise UserError("not found; `pip install huggingface_hub` has it")
        elif status := subprocess.run([program, command, *words], check=False).returncode:
            raise UserError(f"failed with status {status}")
    except UserError as error:
        raise UserError(f"{program} {command}: {error}") from error


def _flag_settings(flags: list[str]) -> Choices:
    """The configuration's flags as settings.

    Raises:
        ConfigError: one can't be read.
    """
    problems: list[str] = []
    settings = {
        key: Choice(setting.value, "as given") for key, setting in config_flags(flags, problems)
    }
    if "job.config_file" in settings:
        problems.append(
            "--config: `init` writes a configuration; name its model, data and hardware instead"
        )
    if problems:
        raise ConfigError(problems)
    return settings


def _check_folder(folder: Path, *, force: bool) -> None:
    if not force and (clashes := projects.existing(folder)):
        raise ConfigError(
            [
                f"FOLDER: {folder} has {', '.join(clashes)}; choose another, or --force "
                "overwrites them"
            ]
        )


def _ask(
    options: argparse.Namespace, asker: Asker, settings: Choices
) -> tuple[Request, str | None]:
    """The request that flags and answers make, and the hardware file of this machine's CPU, if it
    was measured.
    """
    model = asker.answer(questions.model_question(), options.model)
    data = asker.answer(questions.data_question(), options.data)
    gpus, local_count = local_gpus()
    hardware, measured = asker.answer(questions.hardware_question(gpus), options.hardware) or (
        None,
        None,
    )
    on_cpu = hardware is not None and hardware.device == "cpu"
    devices: int | None = None
    if options.nodes and hardware:
        devices = options.nodes * (options.gpus_per_node or hardware.devices_per_host)
    elif options.nodes is None:
        is_local = hardware is not None and hardware.name == gpus
        host_devices = (
            None if hardware is None else hardware.usual_devices or hardware.devices_per_host
        )
        default = local_count if is_local else host_devices
        single_device = on_cpu and options.devices is None
        devices = asker.answer(
            questions.devices_question(default), "1" if single_device else options.devices
        )
    # `training.steps` answers the question, too.
    length = (
        f"{options.hours}h"
        if options.hours
        else options.tokens or ("1" if "training.steps" in settings else None)
    )
    tokens, hours = asker.answer(questions.length_question(model, on_cpu=on_cpu), length) or (
        None,
        None,
    )
    seq_len = settings["training.seq_len"].value if "training.seq_len" in settings else None
    seq_len = asker.answer(
        questions.seq_len_question(model), options.seq_len if seq_len is None else str(seq_len)
    )
    folder = asker.answer(questions.folder_question(model), options.folder)
    asker.check()
    assert model is not None and data is not None and hardware is not None  # noqa: PT018 - no test
    assert devices is not None and seq_len is not None and folder is not None  # noqa: PT018
    return Request(
        model,
        data,
        hardware,
        devices,
        seq_len=seq_len,
        folder=folder,
        tokens=tokens,
        hours=hours,
        flag_settings=settings,
    ), measured


def _command(request: Request, options: argparse.Namespace, number: int, flags: list[str]) -> str:
    """The command that makes the same project without questions."""
    hardware_name = (
        CPU
        if options.hardware in (None, CPU) and request.on_cpu
        else options.hardware or request.hardware.name
    )
    settings = {
        "model": request.model.folder or request.model.name,
        "data": request.data.path or request.data.dataset,
        "hardware": hardware_name,
        "devices": request.devices,
        "gpus-per-node": options.gpus_per_node,
        "seq-len": request.seq_len,
        "tokens": None if request.tokens is None else f"{request.tokens:.12g}",
        "hours": None if request.hours is None else f"{request.hours:.6g}",
        "choose": number if number > 1 else None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "container": options.container,
    }
    words = ["torchtitan", "init", str(request.folder)]
    for name, value in settings.items():
        words += [] if value is None else [f"--{name}", str(value)]
    words += [f"--sbatch={line}" for line in options.sbatch]
    words += [] if options.slurm is None else ["--slurm" if options.slurm else "--no-slurm"]
    return shlex.join([*words, *flags])
