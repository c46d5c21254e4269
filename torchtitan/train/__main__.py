"""`torchrun ... -m torchtitan.train`: one rank of a run."""

import os
import sys

from torchtitan.utils.process import REPORTER_ENV, reporting_rank, run_main
from torchtitan.utils.signals import die_with_parent, exit_when_stopped


def main(argv: list[str]) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.environ.get(REPORTER_ENV, ""))
    exit_when_stopped()
    from torchtitan.train.rank_main import main  # takes half a second, in which a signal may arrive

    return main(argv)


sys.exit(run_main(main, rank=reporting_rank()))
