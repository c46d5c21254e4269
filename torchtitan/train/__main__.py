"""`torchrun ... -m torchtitan.train`: one rank of a run."""

import sys

from torchtitan.utils.process import reporting_rank, run_main
from torchtitan.utils.signals import exit_when_stopped


def main(argv: list[str]) -> int:
    exit_when_stopped()
    from torchtitan.train.rank_main import main  # takes half a second, in which a signal may arrive

    return main(argv)


sys.exit(run_main(main, rank=reporting_rank()))
