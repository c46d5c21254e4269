"""The command line: `torchtitan COMMAND ...`, one module per command.

Each module has `parser()`, which declares the command's options, and `main(argv)`, which returns
the exit status.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import tomli

from torchtitan import __version__
from torchtitan.utils.errors import did_you_mean
from torchtitan.utils.logging import init_command_logging
from torchtitan.utils.process import refuse_several_tasks, reporting_rank, run_main
from torchtitan.utils.signals import exit_when_stopped

GROUPS = {
    "train": {
        "init": "Start a project: plan, choose a layout, write a configuration.",
        "train": "Train on this machine, or on this node of several.",
        "submit": "Write a Slurm job, or an array of them for many runs.",
        "tokenizer": "Train a tokenizer on your own text.",
        "tokenize": "Tokenize text once, ahead of training.",
    },
    "check before training": {
        "config": "Check and explain a configuration.",
        "data": "Show the first rows that training reads, and bytes per token.",
        "plan": "Predict memory and speed, and find the fastest layout, without a GPU.",
        "rehearse": "Check without a GPU that the ranks of a cluster can't hang.",
        "parity": "Check that a distributed configuration computes what one process does.",
    },
    "look at runs": {
        "runs": "List the runs below a folder.",
        "report": "Show runs, and how they differ.",
        "watch": "Show runs in a browser while they train.",
        "doctor": "Explain why a run hangs or has failed; report this machine's GPUs.",
    },
    "use the model": {
        "ckpt": "Inspect, verify and convert checkpoints.",
        "generate": "Generate text from a checkpoint.",
        "eval": "Score a checkpoint on benchmarks (lm-eval).",
    },
}
"""Commands by group with a line of help each, in the order of `torchtitan --help`."""

COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}

REPLACEMENTS = tomli.loads(Path(__file__).with_name("removed.toml").read_text(encoding="utf-8"))
"""Replacements of removed commands, and of commands' removed options and first arguments."""

RUN_ONCE = {"init", "submit", "tokenize", "tokenizer", "ckpt from-hf", "ckpt to-hf"}
"""Commands whose processes would write the same files."""


def main() -> int:
    """Entry point of the `torchtitan` script."""
    return run_main(_dispatch, rank=reporting_rank())


def command_module(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f"torchtitan.commands.{name.replace('-', '_')}")


def _dispatch(argv: list[str]) -> int | None:
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h"):
        print(_help())
        return 0
    if name == "--version":
        print(f"torchtitan {__version__}")
        return 0
    options = [word.partition("=")[0] for word in argv[1:] if word.startswith("-")]
    calls = (name, *(f"{name} {word}" for word in [*argv[1:2], *options]))
    for words in calls:
        if words in REPLACEMENTS:
            print(f"error: no `{words}` any more: {REPLACEMENTS[words]}", file=sys.stderr)
            return 2
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or "; `torchtitan --help` lists them"
        print(f"error: no command {name!r}{hint}", file=sys.stderr)
        return 2
    if not RUN_ONCE.isdisjoint(calls):
        refuse_several_tasks()
    if name == "train":
        exit_when_stopped()  # before the half second that the import takes
    else:  # the ranks of a run have their own log
        init_command_logging(reporting_rank())
    return command_module(name).main(argv[1:])


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: torchtitan COMMAND ..."]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}{text}" for name, text in commands.items()]
    lines += [
        "",
        "`torchtitan COMMAND --help` lists the options of a command, `torchtitan --version` prints "
        "the version.",
    ]
    return "\n".join(lines)
