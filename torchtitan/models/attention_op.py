"""Attention with a window, sinks, or values of another width than queries: one custom operator.

A sink is a learned logit per head that takes part in the softmax and has no value (gpt-oss,
arXiv:2508.10925, section 2.2; after Xiao et al., arXiv:2309.17453). If a kernel returns `out` and
the log-sum-exp `lse` of the scores, attention with the sink is

    lse' = log(exp(lse) + exp(sink))
    out' = out * exp(lse - lse')

and the kernel's own backward, given `out'` and `lse'`, returns the exact gradients: it computes
`p = exp(score - lse')` and `p * (grad . value - grad . out')`, which is the derivative of the
softmax over scores and sink. The sink's gradient is the same expression with a value of zero:
`-exp(sink - lse') * (grad . out')`, summed over queries.

Shapes: b batch, s sequence, h query heads, k key-value heads, d width of queries and keys, e width
of values.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from torchtitan.models.attention_band import band_backward, band_forward


def attend_variant(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    window: int | None,
    scale: float | None,
    sinks: Tensor | None,
    offset: int | None = 0,
) -> Tensor:
    """Causal attention: q `[b, h, s, d]`, k `[b, k, S, d]`, v `[b, k, S, e]` -> `[b, h, s, e]`.

    Args:
        mask: `[b, 1, s, S]`, true where a query may see a key, if it is not after the query.
        window: a query sees itself and the `window - 1` keys before it. None: all before it.
        scale: factor of the scores. None: `d ** -0.5`.
        sinks: `[h]`, logits that take part in each head's softmax.
        offset: position of the first query among the keys. None: unknown; the mask alone decides,
            and there must be no window.
    """
    assert offset is not None or (mask is not None and window is None), "unknown positions"
    if scale is None:
        scale = q.shape[-1] ** -0.5
    out, _ = attention(q, k, v, sinks, mask, window, scale, offset)
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
    out, lse = band_forward(q, k, v, mask, offset, window, scale)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    dq, dk, dv = band_backward(grad, q, k, v, out, lse, mask, offset, window, scale)
    return _by_token(dq), _by_token(dk), _by_token(dv)


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        for x in (q, k, v)
    )
    return dq, dk, dv


def _by_token(x: Tensor) -> Tensor:
    """The memory layout in which projections read and write heads: `[b, s, h, d]`, contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ---- sinks


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, if each head's sink takes part in the softmax.

    Args:
        out: `[b, h, s, e]`, or `[s, h, e]`.
        lse: `[b, h, s]`, or `[h, s]`.
        sinks: `[h]`. None changes nothing.
    """
    return (out, lse) if sinks is None else _joining(out.device.type)(out, lse, sinks)


def _join(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    logits = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logits)
    share = share.mT if lse.dim() == 2 else share
    return (out * share.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, logits)


@cache
def _joining(device_type: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`_join`, fused on CUDA."""
    return torch.compile(_join, dynamic=False) if device_type == "cuda" else _join


def sink_gradients(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradients `[h]` of `join_sinks` with the result `out` and `lse`."""
    products = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    products = products.mT if lse.dim() == 2 else products
    parts = torch.exp(sinks.to(lse.dtype)[:, None] - lse) * products
    return parts.sum(-1).reshape(-1, len(sinks)).sum(0).neg().to(sinks.dtype)


# ---- differentiation and cost


def register_backward(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Differentiate an operator of attention.

    Args:
        forward: `(q, k, v, sinks, *rest) -> (out, lse)`, where sinks may be None.
        backward: `(grad, q, k, v, out, lse, *rest) -> (dq, dk, dv)`.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, *rest = inputs
        ctx.save_for_backward(q, k, v, *output, sinks, *map(_tensor, rest))
        ctx.rest = [None if isinstance(value, Tensor) else value for value in rest]
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        rest = [
            value if tensor is None else tensor
            for tensor, value in zip(tensors, ctx.rest, strict=True)
        ]
        of_sinks = None if sinks is None else sink_gradients(grad, out, lse, sinks)
        grads = backward(grad, q, k, v, out, lse, *rest)
        return *grads, of_sinks, *([None] * len(rest))

    forward.register_autograd(differentiate, setup_context=save)


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


register_backward(attention, attention_backward)


def counted_pairs(seq_len: int, window: int | None = None) -> int:
    """Pairs of query and key in a row that model FLOPs count: twice the visible ones.

    Without a window they are the whole square, by the convention of `module_flops`.
    """
    if window is None or window >= seq_len:
        return seq_len * seq_len
    return window * (2 * seq_len - window)


@register_flop_formula(torch.ops.torchtitan.attention)
def _forward_flops(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    sinks: torch.Size | None,
    mask: torch.Size | None,
    window: int | None,
    scale: float,
    offset: int | None,
    **_: object,
) -> int:
    """Two products. Parts of a row add up to the row."""
    b, h, s, d = q
    pairs = s * k[2]
    if offset is not None:
        pairs = counted_pairs(offset + s, window) - counted_pairs(offset, window)
    return 2 * b * h * pairs * (d + v[-1])


@register_flop_formula(torch.ops.torchtitan.attention_backward)
def _backward_flops(
    grad: torch.Size,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    out: torch.Size,
    lse: torch.Size,
    mask: torch.Size | None,
    window: int | None,
    scale: float,
    offset: int | None,
    **_: object,
) -> int:
    """Four products: recomputed scores don't count, as if attention were spelled out."""
    return 2 * _forward_flops(q, k, v, None, mask, window, scale, offset)
