"""Initial weights are the same bit for bit under every layout."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan.models.layers.linear import PerHead
from torchtitan.models.spec import Init
from torchtitan.parallel.init import ROWS_PER_BLOCK, materialize
from torchtitan.parallel.tensor.styles import apply_tensor_parallel

CPU = torch.device("cpu")


class Toy(nn.Module):
    """More rows than one block, and sizes that three ranks don't divide (tensor parallelism needs
    them even).
    """

    norm = None

    def __init__(self):
        super().__init__()
        self.tall = nn.Linear(9, 2 * ROWS_PER_BLOCK + 36, bias=False)
        self.small = nn.Linear(2 * ROWS_PER_BLOCK + 36, 3, bias=True)
        self.decay = PerHead(10)

    def init_buffers(self):
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def rule(fqn):
    if fqn == "decay.weight":
        return Init("log_uniform", low=0.01, high=16.0)
    return Init("ones") if fqn.endswith("bias") else Init("normal", 0.5)


def build_toy(layout):
    with torch.device("meta"):
        toy = Toy()
    world = dist.get_world_size()
    if layout == "tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        styles = {"tall": "columns", "small": "rows", "decay": "per_head"}
        apply_tensor_parallel(toy, mesh["tp"], styles, sharded_loss=False, float8=False)
        fully_shard(toy, mesh=mesh["dp"])
    elif layout == "hsdp":
        fully_shard(
            toy,
            mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")),
        )
    elif layout == "fsdp":
        fully_shard(toy, mesh=init_device_mesh("cpu", (world,)))
    materialize(toy, CPU, CPU, 7, rule)
    return toy


def full_weights(layout):
    toy = build_toy(layout)
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in toy.named_parameters()}
    return {name: value.detach().clone() for name, value in full.items()} | {"table": toy.table}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "fsdp"),
        (3, "fsdp"),
        (4, "fsdp"),
        (4, "hsdp"),
        pytest.param(4, "tp", marks=pytest.mark.proof),
    ],
)
def test_weights_do_not_depend_on_the_layout(ranks, world, layout):
    expected = ranks(1, full_weights, "plain")[0]
    for actual in ranks(world, full_weights, layout):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


def test_weights_are_what_the_rule_says():
    toy = Toy()
    materialize(toy, CPU, CPU, 7, rule)
    tall = toy.tall.weight
    assert tall.std().item() == pytest.approx(0.5, rel=0.05)
    assert tall.abs().max() <= 1.5
    assert torch.equal(toy.small.bias, torch.ones(3))
    blocks = tall[: 2 * ROWS_PER_BLOCK].view(2, ROWS_PER_BLOCK, 9)
    assert not torch.equal(blocks[0], blocks[1]), "each block of rows has a stream of its own"


def test_logarithms_are_finite_in_bf16():
    toy = Toy()
    toy.decay = PerHead(4096)
    toy.to(torch.bfloat16)
    materialize(toy, CPU, CPU, 7, rule)
    rates = toy.decay.weight.float().exp()
    assert 0.0099 < rates.min() < 0.05
    assert 15.8 < rates.max() < 16.1  # bf16 rounds the logarithm
    assert rates.mean().item() == pytest.approx(8, rel=0.03)


def test_another_seed_or_name_gives_other_weights():
    def build(seed):
        toy = Toy()
        materialize(toy, CPU, CPU, seed, rule)
        return toy

    one = build(1)
    other = build(2)
    assert not torch.equal(one.tall.weight, other.tall.weight)
    assert not torch.equal(one.tall.weight.flatten()[:9], one.small.weight.flatten()[:9])
