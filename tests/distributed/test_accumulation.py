"""Gradient accumulation: what a rank keeps from one batch to the next, and that the sum is the
gradient of all.
"""

import gc
import time

import pytest
import torch
import torch.distributed as dist

from tests.rounding import assert_rounds
from tests.runs import arguments, full, storages
from torchtitan.config import resolve
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import HostUpdate, forward_backward
from torchtitan.utils.torch_versions import feature_release

P = "--parallelism."
ONCE = f"{P}fsdp_reduce_once_per_step"
OFFLOAD = "--training.enable_cpu_offload"
DDP = f"{P}data_parallel_replicate_degree=2"
WAYS = {
    # ranks, settings, and the part of the gradients that a rank keeps between two batches
    "one rank": (1, [], 1),
    "fsdp": (2, [], 1 / 2),
    "fsdp, reduced once": (2, [ONCE], 1),
    "fsdp, offloaded": (2, [OFFLOAD], 1 / 2),
    "ddp": (2, [DDP], 1),
    "context": (2, [f"{P}context_parallel_degree=2"], 1 / 2),
    "hsdp": (4, [DDP], 1 / 2),
    "hsdp, offloaded": (4, [DDP, OFFLOAD], 1 / 2),
}
SLOW = ("one rank", "fsdp, offloaded", "ddp", "context", "hsdp", "hsdp, offloaded")
SHOWN = feature_release(torch.__version__) < (2, 15)
"""Python sees the whole gradients that FSDP adds up."""


def settled_bytes():
    """Bytes of all tensors. gloo's threads let go of those of a collective a moment after it has
    ended.
    """
    readings = []
    for _ in range(3):
        gc.collect()
        readings.append(sum(storages().values()))
        time.sleep(0.01)
    return min(readings)


def accumulate(argv):
    """Bytes that this rank holds after each batch more than before the step, and the whole
    gradients at the end.
    """
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config), torch.device("cpu"))
    batch = next(iter(engine.loader))
    run = engine.compute.forward_backward
    held = []
    before = settled_bytes()

    def watched(*args, **kwargs):
        loss = run(*args, **kwargs)
        gradients = [p.grad for model in engine.models for p in model.parameters()]  # noqa: F841 - else C++ alone has them
        held.append(settled_bytes() - before)
        return loss

    engine.compute.forward_backward = watched
    forward_backward(engine, batch, HostUpdate(engine, 0.0))
    engine.loader.close()
    return held, {
        name: full(p.grad).float() for m in engine.models for name, p in m.named_parameters()
    }


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """Gradients of one batch on one rank."""
    return ranks(1, accumulate, arguments(tmp_path_factory.mktemp("whole"), local_batch=8))[0][1]


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=pytest.mark.slow) if w in SLOW else w for w in WAYS]
)
def test_what_is_kept_between_batches(ranks, whole, tmp_path, way):
    world, extra, share = WAYS[way]
    size = 4 * share * sum(gradient.numel() for gradient in whole.values())
    for held, gradients in ranks(world, accumulate, arguments(tmp_path, *extra, local_batch=1)):
        assert len(held) == 8 // (world // (2 if way == "context" else 1))
        if share < 1 or SHOWN:
            assert held[:-1] == pytest.approx([size] * (len(held) - 1), rel=0.05)
        for name, gradient in gradients.items():
            assert_rounds(gradient, whole[name], of=name)


@pytest.mark.parametrize("offload", [[], pytest.param([OFFLOAD], marks=pytest.mark.slow)])
def test_bf16_parameters_have_sums_in_fp32(ranks, tmp_path, offload):
    """A sum that is rounded once is that of whole gradients, but for the order of its terms."""
    bf16 = ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16", *offload]
    shards, once = (
        ranks(2, accumulate, arguments(tmp_path, *bf16, *extra, local_batch=1))[0][1]
        for extra in ([], [ONCE])
    )
    same = sum(int((shards[name] == once[name]).sum()) for name in once)
    assert same > 0.99 * sum(gradient.numel() for gradient in once.values())
