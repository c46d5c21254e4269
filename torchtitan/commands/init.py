"""Start a project: a configuration with the reason for each value, and the commands that train it.

Plans every legal layout for the hardware and writes a complete file with the best. On a terminal,
asks for values that no flag sets. Configuration flags take precedence over its choices.

    torchtitan init llama3/8B my-8b --data c4 --hardware h100-sxm --devices 64 --tokens 160B
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from torchtitan.config.load.command_line import config_flags, show_help, split_args
from torchtitan.tools.launch import project as projects
from torchtitan.tools.launch.ask import Asker
from torchtitan.tools.launch.data_choice import find_data
from torchtitan.tools.launch.layout_choice import best_layout
from torchtitan.tools.launch.model_choice import DEBUG, find_model, offered
from torchtitan.tools.launch.recipe import TOKENS_PER_PARAMETER, default_seq_len, suggested_tokens
from torchtitan.tools.launch.request import Choice, Choices, Request
from torchtitan.tools.launch.slurm_script import check_words
from torchtitan.tools.planner.cpu import CPU, find_or_measure
from torchtitan.tools.planner.hardware import Hardware, hardware_with, load_hardware
from torchtitan.utils.accelerators import NoDriver, visible_gpus
from torchtitan.utils.argument_types import command_parser, count
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import brief, show_tokens

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_HOURS = {"m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}
_CPU_TIME = "10min"
"""Default training time on a CPU, long enough to see the loss fall."""


def parser() -> argparse.ArgumentParser:
    usage = "torchtitan init [MODEL [FOLDER]] [options] [--section.key value ...]"
    parser = command_parser("init", __doc__, usage=usage)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="FAMILY/SIZE, or a local Hugging Face folder")
    add(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="of the project (named after the model)",
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
    add("--devices", metavar="N", help="number of GPUs, on all nodes together")
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
    add("--yes", action="store_true", help="take all defaults instead of asking")
    add("--force", action="store_true", help="overwrite the files of an earlier project")
    return parser


def main(argv: list[str]) -> int:
    show_help(argv, whole=False)
    words, flags = split_args(argv)
    options = parser().parse_intermixed_args(words)
    check_words("", argv)  # flags become a comment in the file
    settings = _flag_settings(flags)
    if options.folder:
        _check_folder(options.folder, force=options.force)
    asker = Asker(defaults=options.yes)
    request, cpu_file = _request(options, settings, asker)
    per_node = options.gpus_per_node or request.hardware.devices_per_host
    if request.on_cpu and not request.data.is_here:
        raise ConfigError([f"--data: no file or folder {request.data.path}"])
    projects.nodes_of(request.devices, per_node)
    _check_folder(request.folder, force=options.force)
    print("Searching for the best layout ...", file=sys.stderr)
    layout = best_layout(request)
    words = [*asker.answers, *(word for word in argv if word not in ("--yes", "--force"))]
    command = shlex.join(["torchtitan", "init", *words])
    project = projects.make_project(request, layout.plan, command, per_node=per_node)
    if cpu_file:
        project.files[projects.HARDWARE] = cpu_file
    projects.write(project)
    print(projects.summary(project, layout))
    return 0


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


# ---- what the user wants


def _request(
    options: argparse.Namespace, settings: Choices, asker: Asker
) -> tuple[Request, str | None]:
    """The request that flags and answers make, and the hardware file of this machine's CPU, if it
    was measured.

    Raises:
        ConfigError: values are missing or wrong.
    """
    names = ", ".join(model.name for model in offered())
    model = asker.value(
        "MODEL",
        options.model,
        find_model,
        values=f"{names}, or a Hugging Face folder",
        default=f"llama3/{DEBUG}",
    )
    data = asker.value(
        "--data NAME|PATH",
        options.data,
        find_data,
        values="demo (Python's standard library), c4, a file or folder, or org/name:config@split "
        "of the hub",
        default="demo",
    )
    gpus, local_count = local_gpus()
    hardware, cpu_file = asker.value(
        "--hardware NAME",
        options.hardware,
        find_or_measure,
        values=f"{CPU} (this machine's), {', '.join(load_hardware())}, or a TOML file",
        default=gpus or CPU,
    ) or (None, None)
    devices = _devices(options, asker, hardware, local_count if gpus else 0)
    on_cpu = hardware is not None and hardware.device == "cpu"
    values = "tokens, as 160B, or a time, as 10min, 12h, 3d"
    default = _CPU_TIME
    if model:
        suggestion = show_tokens(suggested_tokens(model))
        kind = "active parameter" if len(set(model.parameters())) > 1 else "parameter"
        values += f"; {TOKENS_PER_PARAMETER} tokens per {kind} (arXiv:2203.15556) are {suggestion}"
        default = _CPU_TIME if on_cpu else suggestion
    # `training.steps` answers, too.
    steps = "1" if "training.steps" in settings else None
    tokens, hours = asker.value(
        "--tokens N or --hours N",
        f"{options.hours}h" if options.hours else options.tokens or steps,
        parse_length,
        values=values,
        default=default,
    ) or (None, None)
    row = settings["training.seq_len"].value if "training.seq_len" in settings else options.seq_len
    seq_len = asker.value(
        "--seq-len N",
        str(row or (default_seq_len(model) if model else 1)),
        _count("--seq-len", most=2**27),
        values="tokens of a row",
        default=None,
    )
    asker.check()
    assert model and data and hardware and devices and seq_len  # noqa: PT018 - no test
    request = Request(
        model,
        data,
        hardware,
        devices,
        seq_len=seq_len,
        folder=Path(options.folder or re.sub(r"[^\w.-]+", "-", model.name.lower())),
        tokens=tokens,
        hours=hours,
        flag_settings=settings,
    )
    return request, cpu_file


def _devices(
    options: argparse.Namespace, asker: Asker, hardware: Hardware | None, local: int
) -> int | None:
    """
    Args:
        local: number of this machine's GPUs of a known kind.
    """
    default = None
    if hardware:
        default = str(local or hardware.usual_devices or hardware.devices_per_host)
        if hardware.device == "cpu" and options.devices is None:
            return 1
    if options.hardware and not (hardware or options.devices):
        return None  # the hardware is wrong, which alone is reported
    return asker.value(
        "--devices N",
        options.devices,
        _count("--devices", most=10**6),
        values="GPUs on all nodes together",
        default=default,
    )


def parse_length(text: str) -> tuple[float | None, float | None]:
    """Parse (tokens, hours), one of them None: `10M` is tokens, `10m` is a time.

    Raises:
        ConfigError: the text is neither.
    """
    if match := re.fullmatch(r"(\d[\d,]*(?:\.\d+)?(?:[eE]\+?\d\d?)?) ?([A-Za-z]*)", text.strip()):
        number = float(match[1].replace(",", ""))
        unit = match[2]
        hours = number * _HOURS.get(unit, 0.0)
        tokens = 0.0 if unit in _HOURS else number * _UNITS.get(unit.upper(), 0.0)
        if 0 < hours < 1e6:
            return None, hours
        if 0 < tokens < 1e18:
            return tokens, None
    raise ConfigError(
        [
            f"--tokens, --hours: {brief(text)} is neither a number of tokens, as 160B, "
            "nor a time, as 12h"
        ]
    )


def _count(flag: str, most: int) -> Callable[[str], int]:
    """Parser of a number that a flag gives."""

    def parse(text: str) -> int:
        try:
            return count(text, most=most)
        except argparse.ArgumentTypeError as error:
            raise ConfigError([f"{flag}: {error}"]) from None

    return parse


def local_gpus() -> tuple[str | None, int]:
    """Hardware name of this machine's GPUs (None if unknown), and their number."""
    try:
        gpus = visible_gpus()
    except NoDriver:
        return None, 0
    hardware = hardware_with(gpus[0]["name"]) if gpus else None
    return hardware.name if hardware else None, len(gpus)
