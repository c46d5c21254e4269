"""`torchrun ... -m torchtitan.train`: one rank of a run."""

import sys

from torchtitan.train.entry import main
from torchtitan.utils.environment import rank_and_world
from torchtitan.utils.errors import run_main

sys.exit(run_main(main, rank=rank_and_world()[0]))
