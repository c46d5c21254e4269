"""Context parallelism: each rank holds a part of every row, and attention passes keys and values
around.

Ring attention (Liu et al., arXiv:2310.01889): a rank attends to one rank's keys and values after
another, and merges the partial results by online softmax (Milakov & Gimelshein, arXiv:1805.02867).
With a causal mask the last rank would do most of the work. Head-tail balancing (Brandon et al.,
arXiv:2311.09431) therefore cuts a row into 2n chunks and gives chunks r and 2n-1-r to rank r, so
all blocks of the ring cost the same.

CPU and CUDA share the implementation: two custom operators built from functional collectives and
the kernel that torch chooses for a block (on CUDA cuDNN's or FlashAttention). The compiler sees a
single node, which an activation checkpointing policy can name.

Shapes: b batch, h query heads, k key-value heads, s positions on this rank, d head size, n ranks.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.attention import SDPBackend

from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.models.layers import Attend, Mask, attention_backend
from torchtitan.parallel.mesh import Mesh

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
_all_gather = getattr(  # its name until torch 2.12 is deprecated
    _functional_collectives,
    "all_gather_single_autograd",
    _functional_collectives.all_gather_tensor_autograd,
)


def local_positions(
    seq_len: int,
    degree: int,
    rank: int,
    balanced: bool,
    device: torch.device | None = None,
) -> Tensor:
    """Positions in their row of the tokens that context-parallel rank `rank` holds: `[seq_len /
    degree]`.
    """
    if not balanced or degree == 1:
        return torch.arange(seq_len, device=device).chunk(degree)[rank]
    chunks = torch.arange(seq_len, device=device).chunk(2 * degree)
    return torch.cat([chunks[rank], chunks[2 * degree - 1 - rank]])


def build_attention(mesh: Mesh, p: Parallelism, device: torch.device) -> Attend:
    """Attention over the part of a row that each rank of `mesh` holds."""
    group = mesh.group("cp")
    if group is None:
        return attention_backend(device.type)
    balanced = bool(p.context_parallel_load_balancer)
    return ring_attention_backend(group, p.context_parallel_rotate_method, balanced)


def ring_attention_backend(group: dist.ProcessGroup, rotate: str, balanced: bool) -> Attend:
    """Attention over a sequence sharded by `local_positions`: a causal ring; with a mask, over
    gathered keys.

    Args:
        rotate: how keys and values travel: `allgather` (all at once) or `alltoall` (rank to rank,
        overlapped).
    """
    return partial(
        _attend,
        group_name=group.group_name,
        ranks=group.size(),
        rotate=rotate,
        balanced=balanced,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    group_name: str,
    ranks: int,
    rotate: str,
    balanced: bool,
) -> Tensor:
    if mask is None:
        return ring_attention(q, k, v, q.shape[-1] ** -0.5, group_name, rotate, balanced)[0]
    k, v = _whole_sequence(torch.stack([k, v]), group_name, ranks, balanced)
    return attention_backend(q.device.type)(q, k, v, mask)


def _whole_sequence(
    x: Tensor,
    group_name: str,
    n: int,
    balanced: bool,
) -> Tensor:
    """All-gather `[2, b, k, s, d]` into the order of the row: `[2, b, k, n s, d]`.

    By the group's name, because a compiled block can't look up the group.
    """
    parts = _all_gather(x, 0, group_name).chunk(n)
    if (
        balanced
    ):  # rank r has chunks r and 2n-1-r; not by index, whose backward adds up by `index_put`
        chunks = [part.chunk(2, dim=3) for part in parts]
        parts = (*(first for first, _ in chunks), *(second for _, second in reversed(chunks)))
    return torch.cat(parts, dim=3)


# ---- the local kernel: output and log-sum-exp of one block, and its backward


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> int:
    """The kernel for attention with gradients that torch's own order and checks choose: a value of
    `SDPBackend`.
    """
    with torch.enable_grad():
        probe = (
            q.detach().requires_grad_()
        )  # an operator's inputs need none, and some kernels have no backward
        return torch._fused_sdp_choice(
            probe, k, v, None, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    kernel = _kernel(q, k, v, causal, scale)
    if kernel == SDPBackend.CUDNN_ATTENTION.value:
        out, lse = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )[:2]
        return out, lse.squeeze(-1)
    if kernel == SDPBackend.FLASH_ATTENTION.value:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    # The memory-efficient kernel, for fp32, doesn't support grouped queries and pads its
    # log-sum-exp.
    k = _repeat_heads(k, q)
    v = _repeat_heads(v, q)
    out, lse = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )[:2]
    return out, lse[..., : q.shape[2]]


def _block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    kernel = _kernel(q, k, v, causal, scale)
    lengths = (None, None, q.shape[2], k.shape[2])
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # unused: there is no dropout
    if kernel == SDPBackend.CUDNN_ATTENTION.value:
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1),
            seed,
            seed,
            None,
            *lengths,
            0.0,
            causal,
            scale=scale,
        )
    if kernel == SDPBackend.FLASH_ATTENTION.value:
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale
        )
    kv_heads = k.shape[1]
    k = _repeat_heads(k, q)
    v = _repeat_heads(v, q)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        None,
        out,
        lse,
        seed,
        seed,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


# ---- the ring


def merge_blocks(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    """Merge attention to other keys into `out` `[b, h, s, d]` and `lse` `[b, h, s]` in place.

    `exp(lse)` is the sum that an output was divided by, so the merged output is the mean weighted
    with it.
    """
    part = part.to(out.dtype)
    part_lse = part_lse.to(lse.dtype)
    out.lerp_(part, torch.sigmoid(part_lse - lse).unsqueeze(-1))
    lse -= F.logsigmoid(lse - part_lse)


@cache
def _merging(device_type: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """`merge_blocks`, fused on CUDA."""
    return torch.compile(merge_blocks, dynamic=False) if device_type == "cuda" else merge_blocks


def _block_of(
    source: int,
    rank: int,
    s: int,
    balanced: bool,
) -> tuple[slice, slice, bool] | None:
    """Which local queries see which of `source`'s keys, and whether the block is causal. None: no
    query sees a key.
    """
    every = slice(0, s)
    first = slice(0, s // 2)
    second = slice(s // 2, s)
    if source == rank:
        return every, every, True
    if balanced:
        return (every, first, False) if source < rank else (second, every, False)
    return (every, every, False) if source < rank else None


def _rotate(
    buffer: Tensor,
    n: int,
    rank: int,
    group_name: str,
    rotate: str,
) -> Iterator[tuple[int, Tensor]]:
    """Every rank and its buffer, the local one first. The next one is in transit while the caller
    uses this one.
    """
    if rotate == "allgather":
        gathered = c10d.all_gather_into_tensor(buffer, n, group_name)
        yield rank, buffer
        parts = c10d.wait_tensor(gathered).view(n, -1)
        for i in range(1, n):
            yield (rank - i) % n, parts[(rank - i) % n]
        return
    for i in range(n):
        following = _shift(buffer, n, rank, group_name) if i < n - 1 else None
        yield (rank - i) % n, buffer
        if following is not None:
            buffer = c10d.wait_tensor(following)


def _shift(
    buffer: Tensor,
    n: int,
    rank: int,
    group_name: str,
) -> Tensor:
    """Start sending `buffer` to the next rank. The result, once waited for, is the previous
    rank's.
    """
    send = [0] * n
    receive = [0] * n
    send[(rank + 1) % n] = receive[(rank - 1) % n] = buffer.numel()
    return c10d.all_to_all_single(buffer, receive, send, group_name)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(buffer: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return buffer[: k.numel()].view(k.shape), buffer[k.numel() :].view(v.shape)


def _accumulator(x: Tensor) -> torch.dtype:
    """The type of sums over blocks: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.custom_op("torchtitan::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    group_name: str,
    rotate: str,
    balanced: bool,
) -> tuple[Tensor, Tensor]:
    """Causal attention of local queries `[b, h, s, d]` to all ranks' keys and values `[b, k, s,
    d]`.

    Returns:
        The output `[b, h, s, d]` and the scores' log-sum-exp `[b, h, s]`, which the backward needs.
    """
    group = _resolve_process_group(group_name)
    n = group.size()
    rank = group.rank()
    s = q.shape[2]
    out = lse = None
    for source, buffer in _rotate(_pack(k, v), n, rank, group_name, rotate):
        block = _block_of(source, rank, s, balanced)
        if block is None:
            continue
        rows, columns, causal = block
        keys, values = _unpack(buffer, k, v)
        part, part_lse = _block_forward(
            q[:, :, rows], keys[:, :, columns], values[:, :, columns], causal, scale
        )
        if out is None or lse is None:
            out, lse = (x.to(_accumulator(q)).contiguous() for x in (part, part_lse))
        else:
            _merging(q.device.type)(out[:, :, rows], lse[:, :, rows], part, part_lse)
    assert out is not None
    assert lse is not None
    return out.to(q.dtype), lse


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=_accumulator(q))


@torch.library.custom_op("torchtitan::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    group_name: str,
    rotate: str,
    balanced: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `ring_attention`. Those of keys and values are summed on the rank that holds
    them.
    """
    group = _resolve_process_group(group_name)
    n = group.size()
    rank = group.rank()
    s = q.shape[2]
    dtype = _accumulator(q)
    size = k.numel() + v.numel()
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    at_once = rotate == "allgather"
    # Either gradients for all ranks, reduced at the end, or one that travels with the keys and
    # values it belongs to.
    dkv = torch.zeros(n if at_once else 1, size, dtype=dtype, device=q.device)
    travelling: Tensor | None = None
    for source, buffer in _rotate(_pack(k, v), n, rank, group_name, rotate):
        block = _block_of(source, rank, s, balanced)
        grads = None
        if block is not None:
            rows, columns, causal = block
            keys, values = _unpack(buffer, k, v)
            grads = _block_backward(
                grad[:, :, rows],
                q[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows].contiguous(),
                causal,
                scale,
            )
        if travelling is not None:
            dkv = c10d.wait_tensor(travelling).view(1, -1)
        if block is not None and grads is not None:
            dk, dv = _unpack(dkv[source if at_once else 0], k, v)
            dq[:, :, rows] += grads[0]
            dk[:, :, columns] += grads[1]
            dv[:, :, columns] += grads[2]
        if not at_once:
            travelling = _shift(dkv.view(-1), n, rank, group_name)
    home = (
        c10d.reduce_scatter_tensor(dkv.view(-1), "sum", n, group_name)
        if travelling is None
        else travelling
    )
    dk, dv = _unpack(c10d.wait_tensor(home), k, v)
    return (
        dq.to(q.dtype),
        dk.to(k.dtype, copy=True),
        dv.to(v.dtype, copy=True),
    )  # an operator's outputs must not alias


@ring_attention_backward.register_fake
def _(grad: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[:3])
    return dq, dk, dv


def _save(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]
) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    return *ring_attention_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


ring_attention.register_autograd(_backward, setup_context=_save)
