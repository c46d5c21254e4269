"""Rank 0 is late: `--experimental.custom_import=tests.faults.late_rank_0`."""

import os
import time

if os.environ.get("RANK") == "0":
    time.sleep(1.5)
