"""Does this configuration compute the same as one process? `torchrun ... -m torchtitan parity --config X.toml`.

The model and the rows are made tiny; degrees, schedule and features stay. The run is compared to plain PyTorch on one
process: loss, gradient norm, every parameter's gradient, token counters, weights after the update. If they differ, each
mesh axis is tried on its own, to say along which one the mistake is.
"""

import os

import torch.distributed as dist

from torchtitan.config import resolve
from torchtitan.lab.parity import check
from torchtitan.parallel.groups import init_distributed
from torchtitan.train.preflight import preflight
from torchtitan.utils.device import current_device
from torchtitan.utils.logging import init_logging, logger


def main(argv: list[str]) -> int:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    init_logging(rank)
    config = resolve(argv, world).config
    preflight(config, output=False)
    logger.setLevel("ERROR")  # the runs themselves are of no interest
    init_distributed(config.comm, current_device())
    passed, text = check(argv)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(text, flush=True)
    return 0 if passed else 1
