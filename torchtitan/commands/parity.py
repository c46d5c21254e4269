"""Check that a configuration computes what one process does.

The model and its data are shrunk; degrees, schedule and features stay. The run is compared with
plain PyTorch on one process: loss, gradient norm, the gradient of every parameter, token counts,
the loads of experts and their biases, weights after the update. If they differ, each mesh axis and
expert parallelism is checked alone, to report which one is wrong. The ranks are gloo processes on
this machine; under torchrun they are torchrun's.
"""

import argparse
import os
import tempfile

from torchtitan.config import Config, resolve
from torchtitan.config.load.command_line import parse_args
from torchtitan.train.preflight import preflight
from torchtitan.utils.argument_types import count

TIMEOUT = 3600
"""Timeout in seconds for all comparisons together."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan parity", description=__doc__)
    parser.add_argument(
        "--nproc-per-node",
        type=count,
        default=1,
        metavar="N",
        help="number of ranks (1); under torchrun, its own",
    )
    return parser


def main(argv: list[str]) -> int:
    options, config_argv = parse_args(parser(), argv)
    if "RANK" in os.environ:
        return _check_under_torchrun(config_argv)
    _resolve(config_argv, options.nproc_per_node)

    # torch, once the configuration is known to be right
    from torchtitan.testing.parity import check
    from torchtitan.testing.ranks import RankPool

    pool = RankPool(options.nproc_per_node)
    try:
        passed, text = pool.run(check, config_argv, timeout=TIMEOUT)[0]
    finally:
        pool.close()
    print(text, flush=True)
    return 0 if passed else 1


def _resolve(config_argv: list[str], ranks: int) -> Config:
    resolved = resolve(config_argv, ranks, check=False)
    preflight(resolved.config, world=ranks, sources=resolved.sources, output=False)
    return resolved.config


def _check_under_torchrun(config_argv: list[str]) -> int:
    import torch.distributed as dist

    from torchtitan.health.flight_recorder import configure_flight_recorder
    from torchtitan.parallel.groups import barrier, init_distributed
    from torchtitan.testing.parity import check
    from torchtitan.utils.device import current_device
    from torchtitan.utils.logging import hide_log, init_logging
    from torchtitan.utils.process import rank_and_world

    rank, world = rank_and_world()
    init_logging(rank)
    config = _resolve(config_argv, world)
    hide_log()
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        configure_flight_recorder(config.comm, folder)
        init_distributed(config.comm, current_device())
        passed, text = check(config_argv)
        barrier()
        dist.destroy_process_group()
    if rank == 0:
        print(text, flush=True)
    return 0 if passed else 1
