"""Checks the commands that the documents show but the tests can't run: with the parsers of the
commands themselves.

A command is wrong if an option, a choice, a name, a file or a variable doesn't exist.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import re
import shlex
import signal
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from torchtitan.commands import COMMANDS, command_module
from torchtitan.config import resolve
from torchtitan.config.load.command_line import config_flags, split_args
from torchtitan.config.load.keys import FIELDS
from torchtitan.tools.launch.data_choice import find_data
from torchtitan.tools.launch.model_choice import find_model
from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import find_hardware

ROOT = Path(__file__).parents[1]
RUN_TRAIN = "./run_train.sh"
CONFIGURED = ("train", "data", "plan", "rehearse", "config", "parity", "submit")
"""Commands that take a configuration file and its flags."""
SBATCH_OPTIONS = {"--nodes", "--gpus-per-node", "--time"}
"""The options of `sbatch` that the documents use; Slurm isn't installed where the tests run."""
EXAMPLE = 'extends = "../train_configs/debug_model.toml"\n'


def parser_of(command: str) -> argparse.ArgumentParser:
    assert command in COMMANDS, f"there is no command {command!r}"
    return command_module(command).parser()


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a command and of its subcommands."""
    options = set()
    for action in parser._actions:
        options.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                options |= options_of(subcommand)
    return options


def script_options(script: Path) -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", script.read_text()))


@functools.cache
def torchrun_parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


@functools.cache
def lm_eval_tasks() -> set[str]:
    """Names of the tasks and groups that come with lm-eval: each has a file or a folder of its
    name.
    """
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks"
    return {path.stem for path in folder.rglob("*") if path.is_dir() or path.suffix == ".yaml"}


def parsed(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """The options among `words`, and the words that aren't the parser's.

    Raises:
        AssertionError: the parser refuses them.
    """
    parser.allow_abbrev = False
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return parser.parse_known_args(words)
    except SystemExit:
        raise AssertionError(complaint.getvalue()) from None


def check_torchtitan(words: list[str], launched: int = 1, *, imports: bool = False) -> None:
    """Check `words` after `torchtitan`.

    Args:
        launched: number of ranks that torchrun starts.
        imports: the configuration imports the reader's own code, and so isn't resolved here.
    """
    command, *rest = words
    if command == "--help":
        return
    parser = parser_of(command)
    own, flags = split_args(rest)
    if command in CONFIGURED:
        parser.add_argument("config", nargs="?")
    options, unknown = parsed(parser, own)
    if command == "train":
        _, unknown = parsed(torchrun_parser(), [*unknown, "script"])  # it needs one
    assert not unknown, f"{command} has no {unknown[0]}"
    check_flags(flags)
    check_names(options)
    config = getattr(options, "config", None)
    if config and not imports and not config.endswith("config.json"):  # a file of the reader's
        resolve(["--job.config_file", config, *flags], launched * world_of(options))
    write_files(command, options)


def check_flags(flags: list[str]) -> None:
    problems: list[str] = []
    keys = [key for key, _ in config_flags(flags, problems)]
    assert not problems, problems
    for key in keys:
        assert key in FIELDS or key.startswith(("custom.", "model.overrides.")), f"no key {key}"


def check_names(options: argparse.Namespace) -> None:
    """Check the values that name something this project or lm-eval has."""
    finders: dict[str, Callable[[str], object]] = {"model": find_model, "data": find_data}
    if "devices" in options:  # of `init`
        for name, find in finders.items():
            if text := getattr(options, name):
                find(text)
    hardware = getattr(options, "hardware", None)
    if hardware and hardware != CPU and not hardware.endswith(".toml"):  # a file is the reader's
        find_hardware(hardware)
    if (tasks := getattr(options, "tasks", None)) and not options.include_path:
        for task in tasks.split(","):
            assert task in lm_eval_tasks(), f"lm-eval has no task {task!r}"


def world_of(options: argparse.Namespace) -> int:
    """Number of ranks that a command's options ask for; the larger end of a range of nodes."""
    nodes = getattr(options, "nnodes", None) or getattr(options, "nodes", None) or (1, 1)
    ranks = getattr(options, "nproc_per_node", None) or getattr(options, "gpus_per_node", None) or 1
    return nodes[1] * ranks * (getattr(options, "world", None) or 1)


def write_files(command: str, options: argparse.Namespace) -> None:
    """Make the configurations that this command would write, for the commands that follow it."""
    folder = None
    if command == "init":
        folder = Path(options.folder)
    if getattr(options, "run", None) and options.run.__name__ == "from_hf":
        folder = Path(options.target)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.toml").write_text(EXAMPLE)
    if getattr(options, "write", None):
        Path(options.write).parent.mkdir(exist_ok=True)
        Path(options.write).write_text(f'extends = "train_configs/{options.config}.toml"\n')


def check_run_train(words: list[str], env: dict[str, str]) -> None:
    known = set(re.findall(r"^#   ([A-Z_]+)  ", (ROOT / RUN_TRAIN).read_text(), re.M))
    assert env.keys() <= known, f"{RUN_TRAIN} reads no {sorted(env.keys() - known)[0]}"
    world = int(env.get("NGPU", "1")) * int(env.get("NNODES", "1").split(":")[-1])
    resolve(["--job.config_file", env.get("CONFIG_FILE", "debug_model"), *words], world)


def check_torchrun(words: list[str]) -> None:
    options, unknown = parsed(torchrun_parser(), words)
    assert not unknown, f"torchrun has no {unknown[0]}"
    ranks = int(options.nproc_per_node)
    assert options.module
    if options.training_script == "torchtitan":
        check_torchtitan(options.training_script_args, ranks)
    else:
        assert options.training_script == "torchtitan.train"
        resolve(options.training_script_args, ranks)


def check_sbatch(words: list[str]) -> None:
    at = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
    assert Path(words[at]).is_file(), f"there is no {words[at]}"
    options = dict(zip(words[:at:2], words[1:at:2], strict=True))
    assert options.keys() <= SBATCH_OPTIONS, options
    world = int(options["--nodes"]) * int(options["--gpus-per-node"])
    resolve(["--job.config_file", *words[at + 1 :]], world)


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), f"there is no module {words[1]}"
        return
    if words[0] == "examples/coordinate_check.py":  # the rest are the configuration's flags
        resolve(words[2:], 1)
        return
    known = script_options(Path(words[0]))
    for word in words[1:]:
        assert not word.startswith("--") or word in known, f"{words[0]} has no {word}"


def check_test_script(words: list[str]) -> None:
    known = script_options(ROOT / "scripts/test.sh")
    for word in words:
        assert not word.startswith("-") or word in known, f"scripts/test.sh has no {word}"


def check_pip(words: list[str]) -> None:
    command, *packages = words
    assert command == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in packages:
        if package != ".":
            name, extra = re.fullmatch(r"([\w-]+)\[([\w-]+)\]", package).groups()
            assert name == project["name"], name
            assert extra in project["optional-dependencies"], f"there is no extra {extra!r}"


def check_torchfrtrace(words: list[str]) -> None:
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    _, unknown = parsed(JobConfig().parser, words)
    assert not unknown, f"torchfrtrace has no {unknown[0]}"


def check_docker(words: list[str]) -> None:
    command, *rest = words
    assert command in ("build", "push"), command
    known = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.M)
    for name, value in pairwise(rest):
        if name == "--build-arg":
            assert value.partition("=")[0] in known, f"the Dockerfile has no ARG {value}"


def check_kill(words: list[str]) -> None:
    name, _ = words
    assert name.startswith("-")
    assert f"SIG{name[1:]}" in signal.Signals.__members__, f"there is no signal {name[1:]}"


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "torchtitan": check_torchtitan,
    "torchrun": check_torchrun,
    "sbatch": check_sbatch,
    "python": check_python,
    "./scripts/test.sh": check_test_script,
    "pip": check_pip,
    "torchfrtrace": check_torchfrtrace,
    "kill": check_kill,
    "docker": check_docker,
}
OF_THE_SHELL = {"echo", "export", "source", "sh", "ssh", "git", "cd", "mkdir"}


def check_command(line: str) -> None:
    """
    Raises:
        AssertionError, UserError: the command is wrong.
    """
    words = shlex.split(line, comments=True)
    env = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    program = words[0]
    rest = words[1:]
    if program == RUN_TRAIN:
        check_run_train(rest, env)
        return
    if env.keys() == {"PYTHONPATH"}:
        assert program == "torchtitan", program
        check_torchtitan(rest, imports=True)
        return
    assert not env, f"only {RUN_TRAIN} takes other variables in the documents"
    assert program in CHECKS or program in OF_THE_SHELL, f"unknown program {program}"
    if program in CHECKS:
        CHECKS[program](rest)
