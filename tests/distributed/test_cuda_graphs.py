"""CUDA graphs of blocks: nothing in a layer's forward and backward depends on the host, and weights
stay in place.

Tensors on the meta device have no values: whatever reads one, or has a shape that depends on one,
raises an error. So a layer that passes can be recorded, and replayed without the host.
"""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.runs import arguments, read_metrics, train
from torchtitan.config import resolve
from torchtitan.models import get_spec
from torchtitan.models.layers import attention_backend
from torchtitan.models.moe import Experts
from torchtitan.parallel.expert import _sharded as sharded
from torchtitan.parallel.fsdp import keep_in_place
from torchtitan.parallel.quantize import check_hardware
from torchtitan.parallel.room import Room
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.errors import ConfigError


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def run_layers(family, group=None, room=None):
    """The forward and backward of each layer, with the experts on the ranks of `group`."""
    spec = get_spec(family)
    args = spec.flavors["debugmodel"]
    with torch.device("meta"):
        model = spec.build(args, attention_backend("cpu"))
        rotations = model.rotations(torch.arange(32))
        x = torch.empty(2, 32, args.dim, requires_grad=True)
        weights = torch.empty(2, 32)
    for module in model.modules():
        if group is not None and isinstance(module, Experts):
            for name, weight in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(weight[::2]))
            module.__class__ = sharded(type(module))
            module.group = group
            module.room = room
    for name, layer in model.layers.items():
        rotation = rotations[args.kind(int(name))]
        if args.has_experts(int(name)):
            out, _ = layer(x, *rotation, None, weights)
        else:
            out = layer(x, *rotation, None)
        out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is not None for p in model.layers.parameters())


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_no_layer_needs_the_host(family):
    run_layers(family)


def test_exchanges_need_the_host_if_they_are_counted(two_ranks):
    run_layers("deepseek_v3", two_ranks, Room(128, 256))
    with pytest.raises(NotImplementedError, match="no data"):
        run_layers("deepseek_v3", two_ranks)


def test_a_cpu_has_none():
    graphs = ["--compile.enable", "--compile.cuda_graphs", "--activation_checkpoint.mode=none"]
    config = resolve([*graphs, "--parallelism.fsdp_reshard_after_forward=never"], 1).config
    with pytest.raises(ConfigError, match=r"compile\.cuda_graphs need CUDA, this is a CPU"):
        check_hardware(config, torch.device("cpu"))


def weights_of_blocks(argv, other):
    """The metrics of a run, those of one whose gathered weights stay in place, and in how many
    places its blocks find each.
    """
    plain = train(argv)
    config = resolve([*argv, other], dist.get_world_size()).config
    trainer = Trainer(config, preflight(config))
    (model,) = trainer.parts.models
    keep_in_place(model)
    places = defaultdict(set)

    def see(layer, _):
        for name, weight in layer.named_parameters():
            places[id(layer), name].add(weight.data_ptr())
        scattered.append(torch.empty(1000))  # memory that is free would be taken

    scattered = []
    for layer in model.layers.values():
        layer.register_forward_pre_hook(see)
    trainer.train()
    trainer.close()
    metrics = read_metrics(Path(config.job.dump_folder))
    return plain["metrics"], metrics, [len(seen) for seen in places.values()]


@pytest.mark.parametrize("world", [1, 2])
def test_weights_can_be_gathered_in_place(ranks, tmp_path, world):
    extra = ["--parallelism.fsdp_reshard_after_forward=never", "--training.local_batch_size=2"]
    argv = arguments(tmp_path, *extra, "--training.mixed_precision_param=bfloat16")
    other = f"--job.dump_folder={tmp_path / 'other'}"
    for plain, kept, places in ranks(world, weights_of_blocks, argv, other):
        assert set(places) == {1}
        for key in ("loss", "grad_norm"):
            assert [r[key] for r in kept] == [r[key] for r in plain]
