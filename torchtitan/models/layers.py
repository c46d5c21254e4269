"""Layers that model families share.

Shapes: b batch, s sequence, h query heads, k key-value heads, d head size.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: q `[b, h, s, d]`, k and v `[b, k, s, d]` -> `[b, h, s, d]`."""

_CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _attend_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _attend_cuda(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(_CUDA_BACKENDS, set_priority=True):
        return _attend_cpu(q, k, v)


def attention_backend(device_type: str) -> Attend:
    """Causal attention for a device: SDPA, with cuDNN's and flash kernels first on CUDA. Chosen once, at build."""
    return _attend_cuda if device_type == "cuda" else _attend_cpu


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Angular frequencies of rotary embeddings (Su et al., arXiv:2104.09864): `[d / 2]`, radians per position."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def scale_frequencies(freqs: Tensor, factor: float, low: float, high: float, original_seq_len: int) -> Tensor:
    """Llama 3.1's scaling: long waves stretch by `factor`, short ones stay, those between are blended linearly."""
    turns = original_seq_len * freqs / (2 * math.pi)  # how often a wave fits into the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / factor)


def rope_cache(freqs: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each `[s, d]` in fp32, for the half-split layout."""
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), freqs).repeat(1, 2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[b, s, heads, d]` by its position; feature i is paired with i + d/2. Computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x.float() * cos[:, None] + rotated * sin[:, None]).type_as(x)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): `w2(silu(w1(x)) * w3(x))`, `[b, s, dim] -> [b, s, dim]`."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
