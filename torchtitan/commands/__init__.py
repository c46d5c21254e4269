"""The command line: `torchtitan COMMAND ...`, one module per command, each with `main(argv) -> exit status`."""

import importlib
import os
import sys

from torchtitan.utils.errors import run_main

COMMANDS = {
    "train": "train a model on this machine, or on this node of several",
    "plan": "predict memory and speed, and find the best layout, without a GPU",
    "config": "check and explain a configuration",
    "parity": "compare a distributed configuration with one process",
    "matrix": "measure what works together",
    "ckpt": "inspect, verify, compare, prune and convert checkpoints",
    "generate": "generate text from a checkpoint",
    "tokenize": "tokenize text once, for training to read",
    "submit": "write a Slurm job for a configuration",
    "doctor": "explain why a run hangs or failed",
}
"""Every command, in the order of `torchtitan --help`."""


def main() -> int:
    """The `torchtitan` script."""
    return run_main(_dispatch, rank=int(os.environ.get("RANK", "0")))


def _dispatch(argv: list[str]) -> int | None:
    if not argv or argv[0] in ("--help", "-h"):
        print("Usage: torchtitan COMMAND ...\n")
        print("\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items()))
        return 0
    if argv[0] not in COMMANDS:
        print(f"error: no command {argv[0]!r}; see torchtitan --help", file=sys.stderr)
        return 2
    return importlib.import_module(f"torchtitan.commands.{argv[0]}").main(argv[1:])
