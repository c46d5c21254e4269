"""The local kernel of ring attention: the queries of a rank against one block of keys.

Shapes: b batch, h query heads, k key-value heads, s queries, S keys, d head size. Queries are
`[b, h, s, d]`, keys and values `[b, k, S, d]`, and the log-sum-exp of the scores is `[b, h, s]`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


def chosen_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> int:
    """The kernel that torch's own order and checks choose: a value of `SDPBackend`."""
    grouped = q.shape[1] != k.shape[1]
    with torch.enable_grad():
        # An operator's inputs need no gradient, but some kernels have no backward.
        probe = q.detach().requires_grad_()
        return torch._fused_sdp_choice(
            probe,
            k,
            v,
            None,
            0.0,
            causal,
            scale=scale,
            enable_gqa=grouped,
        )


def block_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention's output `[b, h, s, d]`, and the log-sum-exp of its scores."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    kernel = chosen_kernel(q, k, v, causal, scale)
    if kernel == SDPBackend.CUDNN_ATTENTION.value:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return out, lse.squeeze(-1)
    if kernel == SDPBackend.FLASH_ATTENTION.value:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    # The memory-efficient kernel, for fp32, knows no grouped queries and pads its log-sum-exp.
    k = _repeat_heads(k, q)
    v = _repeat_heads(v, q)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. `out` and `lse` may be merged from several blocks."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    kernel = chosen_kernel(q, k, v, causal, scale)
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
    dk = dk.unflatten(1, (kv_heads, -1)).sum(2)
    dv = dv.unflatten(1, (kv_heads, -1)).sum(2)
    return dq, dk, dv


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
