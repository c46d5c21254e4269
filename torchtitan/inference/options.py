"""Command-line options of commands that run a trained model. Imports no torch."""

import argparse
from collections.abc import Callable

from torchtitan.utils.argument_types import count, path_or_url
from torchtitan.utils.errors import UserError


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    average: str,
    batch: str,
    dtypes: list[str],
    custom_import: str,
    chat: str,
) -> None:
    """Add the options that choose and load a model.

    Args:
        average: what `--ema` does with the average of the weights.
        batch: what `--batch-size` counts.
        custom_import: what the module of `--custom-import` registers.
        chat: what `--chat` does.
    """
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="folder of a run, of checkpoints, or of a Hugging Face model",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help=f"{average} the average of the weights, which the run kept with ema.enable",
    )
    parser.add_argument(
        "--assets",
        type=path_or_url,
        help="folder of the tokenizer (default: the one used in training)",
    )
    parser.add_argument(
        "--chat", action="store_true", help=f"{chat}, by the tokenizer's chat template"
    )
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        help="dtype of the weights (default: bfloat16; float32 on CPUs and GPUs without it)",
    )
    parser.add_argument(
        "--batch-size", type=count, default=8, help=f"{batch} (default: %(default)s)"
    )
    parser.add_argument(
        "--custom-import", metavar="MODULE", help=f"module that registers {custom_import}"
    )


def report_once(run: Callable[[], int], rank: int) -> int:
    """Return `run()`'s exit status. Mistakes that all ranks find are raised on rank 0 only."""
    try:
        return run()
    except UserError as error:
        if rank == 0:
            raise
        return error.exit_code
