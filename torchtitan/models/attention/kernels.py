"""Attention of some queries to some keys by the device's kernels, forward and backward.

A row's attention is one such block, or several: the steps of a ring, or the blocks of a window.

Shapes: b batch, h query heads, k key-value heads, s queries, S keys, d width of queries and keys,
e width of values. Queries are `[b, h, s, d]`, keys `[b, k, S, d]`, values `[b, k, S, e]`, and the
log-sum-exp of the scores is `[b, h, s]`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


class BlockScores(NamedTuple):
    """Scale and mask of a block's scores."""

    scale: float
    causal: bool = False
    """Queries see the keys up to their own position; else all keys."""
    bias: Tensor | None = None
    """`[s, S]` or `[b, 1, s, S]`, added to the scores; None for causal blocks."""


def chosen_kernel(q: Tensor, k: Tensor, v: Tensor, scores: BlockScores) -> int:
    """The kernel that torch's own order and checks choose: a value of `SDPBackend`."""
    grouped = q.shape[1] != k.shape[1]
    with torch.enable_grad():
        # An operator's inputs need no gradient, but some kernels have no backward.
        probe = q.detach().requires_grad_()
        return torch._fused_sdp_choice(
            probe, k, v, None, 0.0, scores.causal, scale=scores.scale, enable_gqa=grouped
        )


def _kernel_and_width(q: Tensor, k: Tensor, v: Tensor, scores: BlockScores) -> tuple[int, int]:
    """The kernel, and the width that it needs values to have.

    Only for cuDNN are narrow values no slower than wide ones.
    """
    if scores.bias is not None:
        return SDPBackend.EFFICIENT_ATTENTION.value, v.shape[-1]
    kernel = chosen_kernel(q, k, v, scores)
    if q.shape[-1] == v.shape[-1] or kernel == SDPBackend.CUDNN_ATTENTION.value:
        return kernel, v.shape[-1]
    return chosen_kernel(q, k, widen(v, q.shape[-1]), scores), q.shape[-1]


def block_forward(q: Tensor, k: Tensor, v: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
    """Attention's output `[b, h, s, e]`, and the log-sum-exp of its scores."""
    if q.device.type == "cpu":
        dtype = q.dtype
        q, k, v = _to_fp32(q, k, v)
        out, lse = _cpu_forward(q, k, v, _fp32_bias(scores))
        return out.to(dtype), lse
    return _cuda_forward(q, k, v, scores)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
    size = v.shape[-1]
    q, k, v = (widen(x, aligned(x.shape[-1])) for x in (q, k, v))
    kernel, width = _kernel_and_width(q, k, v, scores)
    v = widen(v, width)
    causal, scale = scores.causal, scores.scale
    if kernel == SDPBackend.CUDNN_ATTENTION.value:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return out[..., :size], lse.squeeze(-1)
    if kernel == SDPBackend.FLASH_ATTENTION.value:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out[..., :size], lse
    out, lse = _efficient_forward(q, k, v, scores)
    return out[..., :size], lse


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> Gradients:
    """Gradients of `block_forward`. `out` and `lse` may be merged from several blocks."""
    if q.device.type == "cpu":
        dtype = q.dtype
        grad, q, k, v, out = _to_fp32(grad, q, k, v, out)
        dq, dk, dv = _cpu_backward(grad, q, k, v, out=out, lse=lse, scores=_fp32_bias(scores))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)
    return _cuda_backward(grad, q, k, v, out=out, lse=lse, scores=scores)


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> Gradients:
    head, size = q.shape[-1], v.shape[-1]
    q, k, v = (widen(x, aligned(x.shape[-1])) for x in (q, k, v))
    kernel, width = _kernel_and_width(q, k, v, scores)
    grad, v, out = (widen(x, width) for x in (grad, v, out))
    lengths = (None, None, q.shape[2], k.shape[2])
    seed = no_seed(q)
    causal, scale = scores.causal, scores.scale
    if kernel == SDPBackend.CUDNN_ATTENTION.value:
        tensors = (grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, *lengths, 0.0, causal, scale=scale
        )
    elif kernel == SDPBackend.FLASH_ATTENTION.value:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale
        )
    else:
        dq, dk, dv = _efficient_backward(grad, q, k, v, out=out, lse=lse, scores=scores)
    return dq[..., :head], dk[..., :head], dv[..., :size]


# ---- single kernels


def _to_fp32(*tensors: Tensor) -> list[Tensor]:
    """Tensors in fp32, for the CPU's kernel. In bf16, on an Intel Xeon, its forward is 1.0 to 1.2
    times as long, its backward 2 to 3 times; on an AMD EPYC, both together are 0.8 to 1.4 times as
    long.
    """
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _fp32_bias(scores: BlockScores) -> BlockScores:
    return scores if scores.bias is None else scores._replace(bias=_to_fp32(scores.bias)[0])


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: BlockScores) -> tuple[Tensor, Tensor]:
    """The kernel supports only one width for queries, keys and values."""
    width = max(q.shape[-1], v.shape[-1])
    q, k, values = (widen(x, width) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, values, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale
    )
    return out[..., : v.shape[-1]], lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> Gradients:
    width = max(q.shape[-1], v.shape[-1])
    tensors = (widen(x, width) for x in (grad, q, k, v, out))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, lse, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: BlockScores
) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel, for fp32, has no grouped queries and pads its log-sum-exp."""
    k = repeat_heads(k, q)
    v = repeat_heads(v, q)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _expand_bias(scores.bias, q), True, 0.0, scores.causal, scale=scores.scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: BlockScores
) -> Gradients:
    kv_heads = k.shape[1]
    k = repeat_heads(k, q)
    v = repeat_heads(v, q)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    tensors = (grad, q, k, v, _expand_bias(scores.bias, q), out, lse, no_seed(q), no_seed(q))
    needs_grad = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        *tensors, 0.0, needs_grad, scores.causal, scale=scores.scale
    )
    dk = dk.unflatten(1, (kv_heads, -1)).sum(2)
    dv = dv.unflatten(1, (kv_heads, -1)).sum(2)
    return dq, dk, dv


def no_seed(q: Tensor) -> Tensor:
    """The seed that the kernels require but don't use: there is no dropout."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def aligned(width: int) -> int:
    """The width, raised to a multiple of 8, as CUDA's kernels need: zeros change no product."""
    return width + -width % 8


def widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _expand_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*q.shape[:3], -1)


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with a head for each of the queries'."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
