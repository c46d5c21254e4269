"""The command line: `torchtitan COMMAND ...`, one module per command.

Each module has `parser()`, which declares the command's options, and `main(argv)`, which returns
the exit status.
"""

import importlib
import sys

from torchtitan import __version__
from torchtitan.utils.errors import did_you_mean
from torchtitan.utils.process import reporting_rank, run_main
from torchtitan.utils.signals import exit_when_stopped

COMMANDS = {
    "init": "Start a project: plan, choose a layout, write a configuration and its job.",
    "train": "Train on this machine, or on this node of several.",
    "plan": "Predict memory and speed, and find the fastest layout, without a GPU.",
    "schedule": "Write a pipeline schedule that torch doesn't have, as a CSV file.",
    "rehearse": "Check without a GPU that the ranks of a cluster can't hang.",
    "config": "Check and explain a configuration.",
    "parity": "Check that a distributed configuration computes what one process does.",
    "matrix": "Measure which features work together.",
    "ckpt": "Inspect, verify, compare, prune, upload, convert and merge checkpoints.",
    "generate": "Generate text from a checkpoint.",
    "eval": "Score a checkpoint on benchmarks (lm-eval).",
    "tokenize": "Tokenize text once, ahead of training.",
    "submit": "Write a Slurm job for a configuration, or for a grid of runs.",
    "jobs": "List Slurm jobs and their logs.",
    "runs": "List the runs below a folder.",
    "report": "Show runs, and how they differ.",
    "watch": "Show runs in a browser while they train.",
    "doctor": "Explain why a run hangs or has failed.",
    "completion": "Print a completion script for bash or zsh.",
}
"""Every command, in the order of `torchtitan --help`."""


def main() -> int:
    """The `torchtitan` script."""
    return run_main(_dispatch, rank=reporting_rank())


def _dispatch(argv: list[str]) -> int | None:
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS)) + 2
        print("usage: torchtitan COMMAND ...\n\ncommands:")
        print("\n".join(f"  {command:<{width}}{text}" for command, text in COMMANDS.items()))
        print(
            "\n`torchtitan COMMAND --help` lists the options of a command, `torchtitan "
            "--version` prints the version."
        )
        return 0
    if name == "--version":
        print(f"torchtitan {__version__}")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or "; `torchtitan --help` lists them"
        print(f"error: no command {name!r}{hint}", file=sys.stderr)
        return 2
    if name == "train":
        exit_when_stopped()  # before the half second that the import takes
    return importlib.import_module(f"torchtitan.commands.{name}").main(argv[1:])
