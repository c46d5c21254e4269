"""`torchrun ... -m torchtitan.train`: one rank of a run."""

import os
import sys

from torchtitan.train.entry import main
from torchtitan.utils.errors import run_main

sys.exit(run_main(main, rank=int(os.environ.get("RANK", "0"))))
