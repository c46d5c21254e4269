"""`examples/loop.py` trains as the trainer does."""

import pytest
import torch.distributed as dist

from examples import loop
from tests.runs import arguments, losses, train
from torchtitan.config import resolve

P = "--parallelism."


def looped(argv):
    return list(loop.train(resolve(argv, dist.get_world_size()).config))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, [], marks=pytest.mark.slow),
        (4, [f"{P}tensor_parallel_degree=2", f"{P}pipeline_parallel_degree=2"]),
    ],
    ids=["one rank", "pp 2 x tp 2"],
)
def test_the_losses_are_the_trainers(ranks, tmp_path, world, layout):
    argv = arguments(tmp_path, *layout)
    whole = ranks(world, train, argv)[0]
    assert ranks(world, looped, argv) == [losses(whole)] * world
