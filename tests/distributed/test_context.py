"""Ring attention against attention on one process, and against torch's own context parallelism."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torchtitan.parallel.context import local_positions, ring_attention, ring_attention_backend

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


def ring(rotate, balanced, dtype, kv_heads, compiled=False):
    """Largest differences to attention over the whole sequence, of this rank's part."""
    tensors = inputs(dtype, kv_heads)
    expected = attended(plain, *tensors)
    mine = local_positions(SHAPE["seq"], dist.get_world_size(), dist.get_rank(), balanced)
    attend = ring_attention_backend(dist.group.WORLD, rotate, balanced)
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    actual = attended(attend, *(x[:, :, mine] for x in tensors))
    return [(a - e[:, :, mine]).abs().max().item() for a, e in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    ("world", "dtype", "kv_heads", "limit"),
    [
        (2, torch.float64, 2, 1e-14),
        (4, torch.float64, 1, 1e-14),
        (2, torch.float32, 4, 3e-6),
        (2, torch.bfloat16, 2, 6e-2),
    ],
)
def test_ring_attention_is_attention(ranks, world, rotate, balanced, dtype, kv_heads, limit):
    for differences in ranks(world, ring, rotate, balanced, dtype, kv_heads):
        assert max(differences) < limit


def test_ring_attention_compiles_in_one_graph(ranks):
    for differences in ranks(2, ring, "alltoall", True, torch.float32, 2, True):
        assert max(differences) < 3e-6


def against_torch(rotate):
    """torch's `context_parallel`, taught the CPU's attention kernel by two entries in its dispatch table."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp
    from torch.nn.attention import SDPBackend, sdpa_kernel

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def handler(op, args, kwargs):
        sharded = next(a for a in args if isinstance(a, DTensor))
        args = [a.to_local() if isinstance(a, DTensor) else a for a in args]
        group, scale = sharded.device_mesh.get_group(), kwargs.get("scale")
        if op is forward:
            q, k, v = args[:3]
            out = cp._templated_ring_attention(
                group, 2, forward, query=q, key=k, value=v, is_causal=True, dropout_p=0.0, scale=scale
            )
        else:
            grad, q, k, v, out, lse, *_ = args
            out = cp._templated_ring_attention_backward(
                group, 2, lambda *, is_causal, **kw: backward(**kw, is_causal=is_causal), grad_out=grad,
                grad_out_name="grad_out", query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=True,
                dropout_p=0.0, scale=scale,
            )  # fmt: skip
        return tuple(DTensor.from_local(t, sharded.device_mesh, sharded.placements, run_check=False) for t in out)

    cp.custom_ops[forward] = cp.custom_ops[backward] = handler
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    set_rotate_method(rotate)
    q, k, v, grad = inputs(torch.float32, SHAPE["heads"])
    mine = local_positions(SHAPE["seq"], dist.get_world_size(), dist.get_rank(), True)
    ours = attended(ring_attention_backend(dist.group.WORLD, rotate, True), *(x[:, :, mine] for x in (q, k, v, grad)))
    buffers = [x.clone() for x in (q, k, v, grad)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = attended(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *buffers)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_ring_attention_agrees_with_torch(ranks, rotate):
    assert max(ranks(2, against_torch, rotate)) < 3e-6


@pytest.mark.parametrize("balanced", [True, False])
def test_positions_cover_the_sequence_once_and_balance_the_work(balanced):
    parts = [local_positions(24, 3, rank, balanced) for rank in range(3)]
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    work = [int((part + 1).sum()) for part in parts]  # keys that a rank's queries see
    assert (max(work) == min(work)) == balanced


def fake_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16), torch.empty(2, 2, 6, 8, dtype=torch.bfloat16)
        out, lse = ring_attention(q, k, k, 1.0, dist.group.WORLD.group_name, "allgather", True)
    return out.shape, out.dtype, lse.shape, lse.dtype


def test_shapes_without_data(ranks):
    assert ranks(2, fake_shapes)[0] == ((2, 4, 6, 8), torch.bfloat16, (2, 4, 6), torch.float32)
