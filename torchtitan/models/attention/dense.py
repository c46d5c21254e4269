"""Attention with a window, sinks, or values of another width than queries: one custom operator.

Kernels with windows skip the keys that no query sees. For other kernels, queries are cut into
blocks, each with the keys that it sees and a mask.

A sink is a learned logit per head that takes part in the softmax and has no value (gpt-oss,
arXiv:2508.10925, section 2.2; after Xiao et al., arXiv:2309.17453). If a kernel returns `out` and
the log-sum-exp `lse` of the scores, attention with the sink is

    lse' = log(exp(lse) + exp(sink))
    out' = out * exp(lse - lse')

and the kernel's own backward, given `out'` and `lse'`, returns the exact gradients: it computes
`p = exp(score - lse')` and `p * (grad . value - grad . out')`, which is the derivative of the
softmax over scores and sink. The sink's gradient is the same expression with a value of zero:
`-exp(sink - lse') * (grad . out')`, summed over queries.

Shapes: b batch, s queries, S keys, h query heads, k key-value heads, d width of queries and keys,
e width of values. Queries are `[b, h, s, d]`, keys `[b, k, S, d]`, values `[b, k, S, e]`, and the
log-sum-exp of the scores is `[b, h, s]`.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from torchtitan.models.attention.interface import CAUSAL, Scores
from torchtitan.models.attention.kernels import (
    BlockScores,
    Gradients,
    aligned,
    block_backward,
    block_forward,
    no_seed,
    widen,
)

aten = torch.ops.aten

_QUERIES = 256
"""Queries that share one range of keys, where a kernel takes a mask instead of a window."""
_FLASH_WIDTH = 256
"""The widest head of FlashAttention."""


def attend_variant(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention: q `[b, h, s, d]`, k `[b, k, S, d]`, v `[b, k, S, e]` -> `[b, h, s, e]`.

    Args:
        scores: with a tensor as the mask, or none.
        sinks: `[h]`, logits that take part in each head's softmax.
    """
    alone = scores.mask is not None and scores.window is None
    assert scores.offset is not None or alone, "unknown positions"
    out, _ = attention(q, k, v, sinks, *scores.scaled(q.shape[-1]))
    return out


@torch.library.custom_op("torchtitan::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    window: int | None,
    scale: float,
    offset: int | None,
) -> tuple[Tensor, Tensor]:
    """`attend_variant`'s output, and the scores' log-sum-exp `[b, h, s]` for the backward."""
    out, lse = band_forward(q, k, v, Scores(mask, window, scale, offset))
    out, lse = join_sinks(out, lse, sinks)
    return _by_token(out), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    b, h, s, _d = q.shape
    out = q.new_empty(b, s, h, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(b, h, s, dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("torchtitan::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    window: int | None,
    scale: float,
    offset: int | None,
) -> Gradients:
    """Gradients of queries, keys and values."""
    scores = Scores(mask, window, scale, offset)
    dq, dk, dv = band_backward(grad, q, k, v, out=out, lse=lse, scores=scores)
    return _by_token(dq), _by_token(dk), _by_token(dv)


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:
    dq, dk, dv = (
        x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        for x in (q, k, v)
    )
    return dq, dk, dv


def _by_token(x: Tensor) -> Tensor:
    """The memory layout in which projections read and write heads: `[b, s, h, d]`, contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ---- causal attention within a window


class VisibleBlock(NamedTuple):
    """The queries of a block that see any key, and the keys that any query sees."""

    rows: slice
    columns: slice
    offset: int | None
    """Position of the first of these queries among these keys."""


def visible_block(queries: int, keys: int, offset: int, window: int | None) -> VisibleBlock | None:
    """The visible part of a block under a causal window; None: nothing is visible."""
    reach = keys + queries + abs(offset) if window is None else window
    first = max(0, -offset)
    last = min(queries, keys + reach - 1 - offset)  # exclusive
    if first >= last:
        return None
    begin = max(0, first + offset - reach + 1)
    end = min(keys, last + offset)
    return VisibleBlock(slice(first, last), slice(begin, end), first + offset - begin)


def _shape(queries: int, keys: int, scores: Scores) -> str:
    """`causal` or `full` if the block needs no mask, otherwise `band`."""
    offset = scores.offset
    if offset is None or scores.mask is not None:
        return "band"
    reach = offset + queries if scores.window is None else scores.window
    if reach >= offset + queries:
        if offset >= keys - 1:
            return "full"
        if offset == 0 and queries == keys:
            return "causal"
    return "band"


def band_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Causal attention within a window: its output `[b, h, s, e]`, and its log-sum-exp.

    Every query must see a key.
    """
    assert scores.scale is not None
    shape = _shape(q.shape[2], k.shape[2], scores)
    if shape != "band":
        return block_forward(q, k, v, BlockScores(scores.scale, shape == "causal"))
    if _flash_takes(q, v, scores):
        return _flash_forward(q, k, v, scores)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for block in _visible_blocks(q, k, scores):
        rows, columns, _ = block
        out[:, :, rows], lse[:, :, rows] = block_forward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], _masked_scores(q, block, scores)
        )
    return out, lse


def band_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Gradients:
    """Gradients of `band_forward`. `out` and `lse` may be merged from several blocks."""
    assert scores.scale is not None
    shape = _shape(q.shape[2], k.shape[2], scores)
    if shape != "band":
        block_scores = BlockScores(scores.scale, shape == "causal")
        return block_backward(grad, q, k, v, out=out, lse=lse, scores=block_scores)
    if _flash_takes(q, v, scores):
        return _flash_backward(grad, q, k, v, out=out, lse=lse, scores=scores)
    sums = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=sums, device=q.device) for x in (k, v))
    for block in _visible_blocks(q, k, scores):
        rows, columns, _ = block
        gradients = block_backward(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            out=out[:, :, rows],
            lse=lse[:, :, rows].contiguous(),
            scores=_masked_scores(q, block, scores),
        )
        dq[:, :, rows] = gradients[0]
        dk[:, :, columns] += gradients[1]
        dv[:, :, columns] += gradients[2]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _flash_takes(q: Tensor, v: Tensor, scores: Scores) -> bool:
    return scores.mask is None and scores.offset is not None and _has_windows(q, v)


def _has_windows(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention, which skips keys outside the window, supports these tensors."""
    widest = max(q.shape[-1], v.shape[-1])
    return q.device.type != "cpu" and q.element_size() == 2 and widest <= _FLASH_WIDTH


def _flash_window(q: Tensor, k: Tensor, scores: Scores) -> dict[str, int]:
    """FlashAttention's window: keys before and after a query's, where the last ones coincide."""
    offset, window = scores.offset, scores.window
    assert offset is not None
    after = offset - (k.shape[2] - q.shape[2])
    before = -1 if window is None else window - 1 - after
    assert after >= 0, "keys that no query sees"
    assert window is None or before >= 0, "queries that see no key"
    return {"window_size_left": before, "window_size_right": after}


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    width = aligned(max(q.shape[-1], v.shape[-1]))  # one for all
    tokens = [widen(x, width).transpose(1, 2) for x in (q, k, v)]
    lengths = (None, None, q.shape[2], k.shape[2])
    out, lse, *_ = aten._flash_attention_forward(
        *tokens, *lengths, 0.0, False, False, scale=scores.scale, **_flash_window(q, k, scores)
    )
    return out.transpose(1, 2)[..., : v.shape[-1]], lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Gradients:
    width = aligned(max(q.shape[-1], v.shape[-1]))  # one for all
    tokens = [widen(x, width).transpose(1, 2) for x in (grad, q, k, v, out)]
    lengths = (None, None, q.shape[2], k.shape[2])
    options = (0.0, False, no_seed(q), no_seed(q))
    window = _flash_window(q, k, scores)
    dq, dk, dv = aten._flash_attention_backward(
        *tokens, lse, *lengths, *options, scale=scores.scale, **window
    )
    size = q.shape[-1]
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    return dq[..., :size], dk[..., :size], dv[..., : v.shape[-1]]


def _visible_blocks(q: Tensor, k: Tensor, scores: Scores) -> Iterator[VisibleBlock]:
    """Cut a block along its queries, so that its cost is queries x window."""
    for first in range(0, q.shape[2], _QUERIES):
        rows = min(_QUERIES, q.shape[2] - first)
        if scores.offset is None:
            yield VisibleBlock(slice(first, first + rows), slice(0, k.shape[2]), None)
            continue
        block = visible_block(rows, k.shape[2], scores.offset + first, scores.window)
        assert block is not None
        assert block.rows == slice(0, rows), "queries that see no key"
        yield block._replace(rows=slice(first, first + rows))


def _masked_scores(q: Tensor, block: VisibleBlock, scores: Scores) -> BlockScores:
    """The scores of a block, with a bias of 0, or -inf where a query doesn't see a key."""
    assert scores.scale is not None
    rows = block.rows.stop - block.rows.start
    columns = block.columns.stop - block.columns.start
    visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    if block.offset is not None:
        visible.tril_(block.offset)
        if scores.window is not None:
            visible.triu_(block.offset - scores.window + 1)
    if scores.mask is not None:
        visible = visible & scores.mask[:, :, block.rows, block.columns]
    # A kernel on CUDA needs rows that begin at multiples of 16 bytes.
    width = columns + -columns % 8
    bias = q.new_zeros(*visible.shape[:-1], width)[..., :columns]
    bias = bias.masked_fill_(visible.logical_not_(), float("-inf"))
    return BlockScores(scores.scale, bias=bias)


# ---- sinks


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp after each head's sink has joined the softmax.

    Args:
        out: `[b, h, s, e]`, or `[s, h, e]`.
        lse: `[b, h, s]`, or `[h, s]`.
        sinks: `[h]`. None changes nothing.
    """
    return (out, lse) if sinks is None else _join_kernel(out.device.type)(out, lse, sinks)


def _join(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    logits = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logits)
    share = share.mT if lse.dim() == 2 else share
    return (out * share.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, logits)


@cache
def _join_kernel(device_type: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`_join`, fused on CUDA."""
    return torch.compile(_join, dynamic=False) if device_type == "cuda" else _join


def sink_gradients(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradients `[h]` of the sinks, from `join_sinks`' results `out` and `lse`."""
    products = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    products = products.mT if lse.dim() == 2 else products
    per_query = torch.exp(sinks.to(lse.dtype)[:, None] - lse) * products
    return per_query.sum(-1).reshape(-1, len(sinks)).sum(0).neg().to(sinks.dtype)


# ---- differentiation and cost


def register_backward(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Differentiate an operator of attention.

    Args:
        forward: `(q, k, v, sinks, *options) -> (out, lse)`, where sinks may be None.
        backward: `(grad, q, k, v, out, lse, *options) -> (dq, dk, dv)`.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, *options = inputs
        ctx.save_for_backward(q, k, v, *output, sinks, *map(_tensor, options))
        ctx.options = [None if isinstance(value, Tensor) else value for value in options]
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        options = [
            value if tensor is None else tensor
            for tensor, value in zip(tensors, ctx.options, strict=True)
        ]
        sink_grads = None if sinks is None else sink_gradients(grad, out, lse, sinks)
        grads = backward(grad, q, k, v, out, lse, *options)
        return *grads, sink_grads, *([None] * len(options))

    forward.register_autograd(differentiate, setup_context=save)


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


register_backward(attention, attention_backward)


def flop_pairs(seq_len: int, window: int | None = None) -> int:
    """Pairs of query and key in a row that model FLOPs count: twice the visible ones.

    Without a window they are the whole square, by the convention of `module_flops`.
    """
    if window is None or window >= seq_len:
        return seq_len * seq_len
    return window * (2 * seq_len - window)


@register_flop_formula(torch.ops.torchtitan.attention)
def _forward_flops(
    q: torch.Size, k: torch.Size, v: torch.Size, sinks: Any, *scores: Any, **_: object
) -> int:
    """Two products. The FLOPs of a row's blocks add up to the row's."""
    _mask, window, _scale, offset = scores
    b, h, s, d = q
    pairs = s * k[2]
    if offset is not None:
        pairs = flop_pairs(offset + s, window) - flop_pairs(offset, window)
    return 2 * b * h * pairs * (d + v[-1])


@register_flop_formula(torch.ops.torchtitan.attention_backward)
def _backward_flops(
    grad: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *options: Any, **_: object
) -> int:
    """Four products: recomputed scores don't count, as in attention written out in PyTorch."""
    _out, _lse, *scores = options
    return 2 * _forward_flops(q, k, v, None, *scores)
