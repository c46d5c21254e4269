"""Faults for runs through the real launcher:
`--experimental.custom_import=tests.faults.hang_faults`, FAULT=<name>.
"""

import os
import signal
import time


def sleep():
    time.sleep(14)  # longer than the time limit


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("RANK") == "1":
    from torchtitan.train.forward import Compute

    forward_backward = Compute.forward_backward
    calls = []

    def faulty(*args, **kwargs):
        calls.append(0)
        if len(calls) == 10:  # in step 3
            globals()[os.environ["FAULT"]]()
        return forward_backward(*args, **kwargs)

    Compute.forward_backward = faulty
