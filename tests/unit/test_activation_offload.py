"""Activation offload: the same bits, and as many bytes moved as the planner says."""

import gc
import itertools

import pytest
import torch

from tests.plans import workload
from torchtitan.config import load_config
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.optim.loss import cross_entropy
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.memory.checkpoint import apply_activation_checkpoint
from torchtitan.parallel.memory.offload import Offload, _Copy, apply_activation_offload
from torchtitan.tools.planner.memory import memory_of
from torchtitan.utils.torch_compat import torch_is_before_2_13

SIZES = {"vocab_size": 64, "dim": 64, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 96}
ROWS = 2
SEQ = 256
SHAPE = [
    f"--training.seq_len={SEQ}",
    f"--training.local_batch_size={ROWS}",
    "--training.mixed_precision_param=float32",
    *(f"--model.overrides.{name}={size}" for name, size in SIZES.items()),
]
MODES = {
    "none": ["--activation_checkpoint.mode=none"],
    "full": ["--activation_checkpoint.mode=full"],
    "op": [
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ],
    "compiled": [
        "--activation_checkpoint.mode=none",
        "--compile.enable",
        "--compile.backend=aot_eager",
    ],
}


def run(mode, blocks):
    """Loss and gradients of two batches, and the bytes that were copied to the host."""
    config = load_config(
        [*SHAPE, *MODES[mode], f"--activation_checkpoint.offload_blocks={blocks}"]
    ).config
    torch.manual_seed(0)
    spec = get_spec("llama3")
    model = spec.build(spec.args("8B", SIZES, max_seq_len=SEQ), attention_backend("cpu"))
    apply_activation_checkpoint(model, config.activation_checkpoint)
    torch._dynamo.reset()
    apply_compile(model, config)
    offload = apply_activation_offload(model, config.activation_checkpoint)
    tokens = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 64
    for _ in range(2):
        loss = cross_entropy(model(tokens), tokens).sum()
        loss.backward()
    with torch.no_grad():
        model(tokens)  # moves nothing
    return loss.detach(), [p.grad for p in model.parameters()], offload.bytes_copied


@pytest.mark.parametrize(
    ("mode", "blocks"), [*itertools.product(MODES, [-1]), ("none", 1), ("full", 3)]
)
def test_bits_are_the_same_and_bytes_are_those_planned(mode, blocks):
    loss, gradients, none = run(mode, 0)
    own_loss, own_gradients, bytes_copied = run(mode, blocks)
    assert none == 0
    assert torch.equal(own_loss, loss)
    for own, other in zip(own_gradients, gradients, strict=True):
        assert torch.equal(own, other)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is _Copy], (
        "copies outlive the backward"
    )
    if mode != "compiled":  # what a compiler keeps is its own choice
        of_block = workload("--model.flavor=8B", *SHAPE, *MODES[mode]).offloaded_per_block
        # torch's two RMSNorms keep their results before the weight too
        if mode == "none" and torch_is_before_2_13():
            of_block += 2 * ROWS * SEQ * SIZES["dim"] * 4
        assert bytes_copied == 2 * (4 if blocks < 0 else blocks) * of_block


def test_parts_of_one_tensor_have_copies_of_their_own():
    """Of the same size, at other places of one storage."""

    def forward(block, x):
        first, second = x.chunk(2)
        return first * first.sin() + second.cos() * second

    offload = Offload()
    gradients = []
    x = torch.randn(8, 32, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for own in (forward, offload.wrap(forward, first=True, offloads=True)):
        gradients += torch.autograd.grad(own(torch.nn.Identity(), x * 1.0).sum(), x)
    assert offload.bytes_copied >= x.nbytes
    assert torch.equal(*gradients)


def test_planned_memory_has_two_blocks_on_their_way():
    argv = [
        "--model.flavor=8B",
        "--training.seq_len=8192",
        "--training.local_batch_size=1",
        *MODES["none"],
    ]
    kept, away = (
        memory_of(workload(*argv, f"--activation_checkpoint.offload_blocks={n}"), 0).by_category[
            "activations"
        ]
        for n in (0, -1)
    )
    assert kept - away == 30 * workload(*argv).offloaded_per_block


def test_copies_return_one_block_ahead(monkeypatch):
    events = []
    fetch = _Copy.fetch
    take = _Copy.take

    def noted(kind, function, copy):
        events.append((kind, id(copy)))
        return function(copy)

    monkeypatch.setattr(_Copy, "fetch", lambda copy: noted("fetch", fetch, copy))
    monkeypatch.setattr(_Copy, "take", lambda copy: noted("take", take, copy))
    run("full", 3)  # a copy for each block but the last, whose backward comes first; two batches
    used = [copy for kind, copy in events if kind == "take"]
    assert len(used) == 6
    assert all(events.index(("fetch", copy)) < events.index(("take", copy)) for copy in used)
