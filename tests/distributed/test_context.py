"""Ring attention against attention on one process."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.models.attention import kernels as attention_kernel
from torchtitan.models.attention.backend import document_mask
from torchtitan.models.attention.interface import Scores
from torchtitan.models.attention.kernels import BlockScores, block_backward, block_forward
from torchtitan.parallel.context import attention as context
from torchtitan.parallel.context.attention import (
    merge_blocks,
    ring_attention,
    ring_attention_backend,
)
from torchtitan.parallel.context.layout import local_positions
from torchtitan.testing.difference import rounding

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "seq": 32, "size": 8}


def inputs(dtype, kv_heads=2):
    generator = torch.Generator().manual_seed(3)

    def make(heads):
        shape = (SHAPE["batch"], heads, SHAPE["seq"], SHAPE["size"])
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return make(SHAPE["heads"]), make(kv_heads), make(kv_heads), make(SHAPE["heads"])


def attended(attend, q, k, v, grad):
    """Output and gradients."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def relative(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def ring(rotate, balanced, dtype, kv_heads, compiled=False):
    """Largest differences of this rank's part to attention over the whole sequence, relative to its
    largest element.
    """
    tensors = inputs(dtype, kv_heads)
    expected = attended(plain, *tensors)
    mine = local_positions(SHAPE["seq"], dist.get_world_size(), dist.get_rank(), balanced)
    attend = ring_attention_backend(dist.group.WORLD, rotate, balanced)
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    actual = attended(attend, *(x[:, :, mine] for x in tensors))
    return [relative(a, e[:, :, mine]) for a, e in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    ("world", "dtype", "kv_heads", "limit"),
    [
        (2, torch.float64, 2, rounding(SHAPE["seq"], 3, torch.float64)),
        (4, torch.float64, 1, rounding(SHAPE["seq"], 3, torch.float64)),
        (2, torch.float32, 4, rounding(SHAPE["seq"], 3)),
        (2, torch.bfloat16, 2, rounding(1, 3, torch.bfloat16)),  # sums are in fp32
    ],
)
def test_ring_attention_is_attention(ranks, world, rotate, balanced, dtype, kv_heads, limit):
    for differences in ranks(world, ring, rotate, balanced, dtype, kv_heads):
        assert max(differences) < limit


def test_ring_attention_compiles_in_one_graph(ranks):
    for differences in ranks(2, ring, "alltoall", True, torch.float32, 2, True):
        assert max(differences) < rounding(SHAPE["seq"], 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_merged_blocks_are_attention_to_all_keys(compiled):
    q, k, v, _ = inputs(torch.float64, SHAPE["heads"])
    merge = (
        torch.compile(merge_blocks, backend="aot_eager", fullgraph=True)
        if compiled
        else merge_blocks
    )

    def attention(first, last):
        scores = q @ k[:, :, first:last].mT
        return scores.softmax(-1) @ v[:, :, first:last], scores.logsumexp(-1)

    out, lse = attention(0, 5)
    for first, last in ((5, 6), (6, 32)):
        merge(out, lse, *attention(first, last))
    for ours, whole in zip((out, lse), attention(0, 32), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)
    part, sums = attention(0, 32)
    merge(
        half := out[:, :, 16:],
        lse[:, :, 16:],
        part[:, :, 16:].bfloat16(),
        (sums - 1e3)[:, :, 16:].float(),
    )
    torch.testing.assert_close(half, part[:, :, 16:], rtol=1e-12, atol=1e-12)  # of no weight


def masked(balanced, trace):
    """Differences to masked attention over whole rows, and the operators of the backward."""
    tensors = inputs(torch.float64)
    world = dist.get_world_size()
    documents = (torch.arange(SHAPE["seq"]) // 7).expand(SHAPE["batch"], -1)
    whole = document_mask(documents, torch.arange(SHAPE["seq"]), torch.float64)
    expected = attended(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, whole, enable_gqa=True), *tensors
    )
    mine = local_positions(SHAPE["seq"], world, dist.get_rank(), balanced)
    attend = ring_attention_backend(dist.group.WORLD, "allgather", balanced)
    mask = document_mask(documents, mine, torch.float64)
    parts = [x[:, :, mine] for x in tensors]
    with trace() as operators:
        actual = attended(lambda q, k, v: attend(q, k, v, Scores(mask)), *parts)
    difference = max(relative(a, e[:, :, mine]) for a, e in zip(actual, expected, strict=True))
    return difference, operators.names


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("balanced", [True, False])
def test_a_document_mask_sees_whole_rows_without_indexing(ranks, balanced):
    for difference, operators in ranks(2, masked, balanced, Operators):
        assert difference < rounding(SHAPE["seq"], 3, torch.float64)
        assert "all_gather_into_tensor" in operators
        assert not operators & {"index", "index_put", "index_put_", "_index_put_impl_"}


def order(rotate):
    """What ring attention's forward does, in order."""
    events = []

    def noting(name, function):
        def call(*args):
            events.append(name)
            return function(*args)

        return call

    c10d = SimpleNamespace(
        all_gather_into_tensor=noting("send", context.c10d.all_gather_into_tensor),
        all_to_all_single=noting("send", context.c10d.all_to_all_single),
        wait_tensor=noting("wait", context.c10d.wait_tensor),
    )
    q, k, v, _ = inputs(torch.float32)
    with (
        patch.object(context, "c10d", c10d),
        patch.object(context, "block_forward", noting("block", block_forward)),
    ):
        ring_attention(q, k, v, None, 1.0, dist.group.WORLD.group_name, rotate, True)
    return events


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_a_rank_computes_its_own_block_while_it_sends(ranks, rotate):
    assert ranks(2, order, rotate) == [["send", "block", "wait", "block"]] * 2


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
def test_cuda_kernels_of_a_block_get_what_their_signatures_ask(kernel):
    """On tensors without memory: no CUDA kernel can run here, but their shape functions do."""
    q, k, v = (
        torch.empty(2, heads, length, 64, dtype=torch.bfloat16, device="meta")
        for heads, length in SIZES
    )
    choice = {
        "cudnn": "CUDNN_ATTENTION",
        "flash": "FLASH_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
    }[kernel]
    with patch.object(
        attention_kernel, "chosen_kernel", return_value=getattr(SDPBackend, choice).value
    ):
        out, lse = block_forward(q, k, v, BlockScores(0.125))
        grads = block_backward(out, q, k, v, out, lse, BlockScores(0.125))
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


SIZES = [(8, 32), (2, 64), (2, 64)]
"""Heads and length of queries, keys and values."""


def test_the_kernel_of_a_block_is_torchs_choice_with_gradients():
    q, k, v, _ = inputs(torch.float32)

    def chosen(q, k, v, *_, enable_gqa, **__):
        assert q.requires_grad
        assert torch.is_grad_enabled()
        assert enable_gqa
        return 7

    with patch("torch._fused_sdp_choice", chosen), torch.no_grad():
        assert attention_kernel.chosen_kernel(q, k, v, BlockScores(1.0, True)) == 7


@pytest.mark.parametrize("balanced", [True, False])
def test_positions_cover_the_sequence_once_and_balance_the_work(balanced):
    parts = [local_positions(24, 3, rank, balanced) for rank in range(3)]
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    work = [int((part + 1).sum()) for part in parts]  # keys that a rank's queries see
    assert (max(work) == min(work)) == balanced


def fake_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16)
        k = torch.empty(2, 2, 6, 8, dtype=torch.bfloat16)
        out, lse = ring_attention(
            q, k, k, None, 1.0, dist.group.WORLD.group_name, "allgather", True
        )
    return out.shape, out.dtype, lse.shape, lse.dtype


def test_shapes_without_data(ranks):
    assert ranks(2, fake_shapes)[0] == ((2, 4, 6, 8), torch.bfloat16, (2, 4, 6), torch.float32)
