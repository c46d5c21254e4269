"""Context parallelism: each rank holds a part of every row; keys and values travel between ranks.

Ring attention (Liu et al., arXiv:2310.01889): a rank attends to one rank's keys and values after
another, and merges the partial results by online softmax (Milakov & Gimelshein, arXiv:1805.02867).
With a causal mask the last rank would do most of the work. Head-tail balancing (Brandon et al.,
arXiv:2311.09431) therefore cuts a row into 2n chunks and gives chunks r and 2n-1-r to rank r, so
all blocks of the ring cost the same.

CPU and CUDA share the implementation: two custom operators built from functional collectives and
the kernel that torch chooses for a block (on CUDA cuDNN's or FlashAttention). The compiler sees a
single node, which an activation checkpointing policy can name.

Shapes: b batch, h query heads, k key-value heads, s positions on this rank, d width of queries and
keys, e width of values, n ranks.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed.distributed_c10d import _resolve_process_group

from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.attention.dense import join_sinks, register_backward
from torchtitan.models.attention.flex import attend_blocks
from torchtitan.models.attention.interface import CAUSAL, Attend, Scores
from torchtitan.models.attention.kernels import (
    BlockScores,
    Gradients,
    block_backward,
    block_forward,
)
from torchtitan.parallel.context.layout import RowLayout
from torchtitan.parallel.context.ulysses import ulysses_attention_backend
from torchtitan.parallel.context.window import attend_window
from torchtitan.parallel.mesh import Mesh

c10d = torch.ops._c10d_functional
_all_gather = getattr(  # its name until torch 2.12 is deprecated
    _functional_collectives,
    "all_gather_single_autograd",
    _functional_collectives.all_gather_tensor_autograd,
)


def build_attention(mesh: Mesh, p: Parallelism, device: torch.device) -> Attend:
    """The attention function for the model: over whole rows, or over rows that ranks share."""
    group = mesh.group("cp")
    if group is None:
        return attention_backend(device.type)
    balanced = bool(p.context_parallel_load_balancer)
    if p.context_parallel_method == "ulysses":
        return ulysses_attention_backend(
            attention_backend(device.type), build_row_layout(group, balanced)
        )
    return ring_attention_backend(group, p.context_parallel_rotate_method, balanced)


def build_row_layout(group: dist.ProcessGroup, balanced: bool) -> RowLayout:
    """The layout of a row that the ranks of `group` share."""
    return RowLayout(group.group_name, group.size(), group.rank(), balanced)


def ring_attention_backend(group: dist.ProcessGroup, rotate: str, balanced: bool) -> Attend:
    """Attention over a sequence sharded by `local_positions`.

    Without a mask it is a causal ring; with one, keys and values are gathered first. With a
    window, only the keys in it are exchanged.

    Args:
        rotate: how keys and values travel: `allgather` (all at once) or `alltoall` (rank to rank,
            overlapped).
    """
    layout = build_row_layout(group, balanced)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        row = layout.ranks * q.shape[2]
        scores = scores.clip_window(row)
        mask, window, scale, _ = scores.scaled(q.shape[-1])
        dense = mask is None or isinstance(mask, Tensor)
        if window is not None and dense:
            return attend_window(q, k, v, scores, sinks=sinks, layout=layout)
        if mask is not None:
            k, v = _whole_sequence(k, v, layout)
            if dense:
                return attention_backend(q.device.type)(q, k, v, scores, sinks)
            return attend_blocks(q, k, v, scores, sinks=sinks)
        assert scale is not None
        out, _ = ring_attention(
            q,
            k,
            v,
            sinks,
            scale=scale,
            group_name=layout.group_name,
            rotate=rotate,
            balanced=balanced,
        )
        return out

    return attend


def _whole_sequence(k: Tensor, v: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    """All-gather k `[b, k, s, d]` and v `[b, k, s, e]` in the order of the row: n s keys."""
    sizes = [k.shape[-1], v.shape[-1]]
    shards = _all_gather(torch.cat([k, v], dim=-1), 0, layout.group_name).chunk(layout.ranks)
    keys, values = layout.join_shards(shards, dim=2).split(sizes, dim=-1)
    return keys, values


# ---- the ring


class _Block(NamedTuple):
    """The range of local queries that see keys of another rank, and the range of those keys."""

    rows: slice
    """The queries."""
    columns: slice
    """The keys."""
    causal: bool


class _Ring:
    """The ranks that share a row."""

    def __init__(self, group_name: str, rotate: str, balanced: bool):
        group = _resolve_process_group(group_name)
        self.name = group_name
        self.n = group.size()
        self.rank = group.rank()
        self.at_once = rotate == "allgather"
        self.balanced = balanced

    def visit(self, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank and its buffer, the local one first.

        The next buffer is in transit while the caller uses this one.
        """
        if self.at_once:
            transfer = c10d.all_gather_into_tensor(buffer, self.n, self.name)
            yield self.rank, buffer
            buffers = c10d.wait_tensor(transfer).view(self.n, -1)
            for i in range(1, self.n):
                source = (self.rank - i) % self.n
                yield source, buffers[source]
            return
        for i in range(self.n):
            next_buffer = self.shift(buffer) if i < self.n - 1 else None
            yield (self.rank - i) % self.n, buffer
            if next_buffer is not None:
                buffer = c10d.wait_tensor(next_buffer)

    def shift(self, buffer: Tensor) -> Tensor:
        """Start sending `buffer` to the next rank; the result becomes the previous rank's."""
        send = [0] * self.n
        receive = [0] * self.n
        send[(self.rank + 1) % self.n] = buffer.numel()
        receive[(self.rank - 1) % self.n] = buffer.numel()
        return c10d.all_to_all_single(buffer, receive, send, self.name)

    def visible(self, source: int, s: int) -> _Block | None:
        """The block of attention between the `s` local queries and the keys of rank `source`; None
        if they see none.
        """
        all_rows = slice(0, s)
        if source == self.rank:
            return _Block(all_rows, all_rows, True)
        is_earlier = source < self.rank
        if not self.balanced:
            return _Block(all_rows, all_rows, False) if is_earlier else None
        if is_earlier:
            return _Block(all_rows, slice(0, s // 2), False)
        return _Block(slice(s // 2, s), all_rows, False)


def merge_blocks(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge attention to other keys into `out` `[b, h, s, d]` and `lse` `[b, h, s]` in place.

    `exp(lse)` is the sum that an output was divided by, so the merged output is the mean weighted
    with it.
    """
    block_out = block_out.to(out.dtype)
    block_lse = block_lse.to(lse.dtype)
    out.lerp_(block_out, torch.sigmoid(block_lse - lse).unsqueeze(-1))
    lse -= F.logsigmoid(lse - block_lse)


@cache
def _merge_function(device_type: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """`merge_blocks`, fused on CUDA."""
    return torch.compile(merge_blocks, dynamic=False) if device_type == "cuda" else merge_blocks


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
    sinks: Tensor | None,
    scale: float,
    group_name: str,
    rotate: str,
    balanced: bool,
) -> tuple[Tensor, Tensor]:
    """Causal attention of local queries to the keys and values of all ranks.

    Args:
        q: `[b, h, s, d]`; k `[b, k, s, d]`, v `[b, k, s, e]`.
        sinks: `[h]`, which join when all blocks are merged.

    Returns:
        The output `[b, h, s, e]` and the scores' log-sum-exp `[b, h, s]`, which the backward needs.
    """
    ring = _Ring(group_name, rotate, balanced)
    merge = _merge_function(q.device.type)
    out = torch.empty(0)
    lse = torch.empty(0)
    for source, buffer in ring.visit(_pack(k, v)):
        block = ring.visible(source, q.shape[2])
        if block is None:
            continue
        rows, columns, causal = block
        keys, values = _unpack(buffer, k, v)
        scores = BlockScores(scale, causal)
        block_out, block_lse = block_forward(
            q[:, :, rows], keys[:, :, columns], values[:, :, columns], scores
        )
        if source == ring.rank:  # the first block, which is whole
            out = block_out.to(_accumulator(q)).contiguous()
            lse = block_lse.to(_accumulator(q)).contiguous()
        else:
            merge(out[:, :, rows], lse[:, :, rows], block_out, block_lse)
    out, lse = join_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=_accumulator(q))


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
) -> Gradients:
    """Gradients of `ring_attention`. Each rank gets the sums for its own keys and values.

    They are either gradients for all ranks, reduced at the end, or one that travels with the keys
    and values it belongs to.
    """
    ring = _Ring(group_name, rotate, balanced)
    dtype = _accumulator(q)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    size = k.numel() + v.numel()
    dkv = torch.zeros(ring.n if ring.at_once else 1, size, dtype=dtype, device=q.device)
    transfer: Tensor | None = None
    for source, buffer in ring.visit(_pack(k, v)):
        block = ring.visible(source, q.shape[2])
        grads = None
        if block is not None:
            rows, columns, causal = block
            keys, values = _unpack(buffer, k, v)
            grads = block_backward(
                grad[:, :, rows],
                q[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                out=out[:, :, rows],
                lse=lse[:, :, rows].contiguous(),
                scores=BlockScores(scale, causal),
            )
        if transfer is not None:
            dkv = c10d.wait_tensor(transfer).view(1, -1)
        if grads is not None:
            dk, dv = _unpack(dkv[source if ring.at_once else 0], k, v)
            dq[:, :, rows] += grads[0]
            dk[:, :, columns] += grads[1]
            dv[:, :, columns] += grads[2]
        if not ring.at_once:
            transfer = ring.shift(dkv.view(-1))
    if transfer is None:
        transfer = c10d.reduce_scatter_tensor(dkv.view(-1), "sum", ring.n, group_name)
    dk, dv = _unpack(c10d.wait_tensor(transfer), k, v)
    # Copies, because the outputs of an operator must not alias.
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


register_backward(ring_attention, ring_attention_backward)
