"""Faults for runs through the real launcher:
`--experimental.custom_import=tests.faults.hang_faults`, FAULT=<name>.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from torchtitan.train.built_in import CollectGarbage


def sleep():
    time.sleep(1000)


def other_size():
    dist.all_reduce(torch.ones(100_000, dtype=torch.float64))


def fail_at_the_end():
    def on_end(*_):
        raise RuntimeError("boom")

    CollectGarbage.on_end = on_end


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
