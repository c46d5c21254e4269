"""Rotary positions (Su et al., arXiv:2104.09864), and their scalings for longer contexts.

Shapes: b batch, s sequence, d head size, r rotated features of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.layers.eager import runs_eagerly
from torchtitan.models.rope_scaling import AnyScaling, LinearScaling, RopeScaling, YarnScaling


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Frequencies of RoPE (Su et al., arXiv:2104.09864): `[d / 2]`, in radians per position."""
    features = torch.arange(0, head_dim, 2, dtype=torch.float32)
    return theta ** -(features / head_dim)


def rope_cache(
    dim: int, theta: float, scaling: AnyScaling | None, seq_len: int
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at every position, `[s, r]` in fp32, for features i and i + r/2
    in pairs.

    Args:
        dim: rotated features of a head, r.
    """
    freqs = rope_frequencies(dim, theta)
    magnitude = 1.0
    match scaling:
        case RopeScaling():
            freqs = _scale_by_wavelength(freqs, scaling)
        case YarnScaling():
            freqs = _scale_by_yarn(freqs, theta, scaling)
            magnitude = scaling.rope_factor
        case LinearScaling():
            freqs = freqs / scaling.factor
    positions = torch.arange(seq_len, dtype=torch.float32)
    angles = torch.outer(positions, freqs).repeat(1, 2)
    return angles.cos() * magnitude, angles.sin() * magnitude


def _scale_by_wavelength(freqs: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept."""
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    turns = scaling.original_max_seq_len * freqs / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / scaling.factor)


def _scale_by_yarn(freqs: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """YaRN's scaling (arXiv:2309.00071, section 3.2), which is linear between two features."""
    dim = 2 * len(freqs)

    def feature(turns: float) -> float:
        """The feature with this number of periods in the original context."""
        wavelength = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    first = feature(scaling.beta_fast)
    last = feature(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    if first == last:  # as where the two betas are equal
        last += 0.001
    weight = ((torch.arange(len(freqs)) - first) / (last - first)).clamp(0, 1)
    return freqs * (1 - weight) + freqs / scaling.factor * weight


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first r features of `x` `[b, s, heads, d]`, in fp32.

    Feature i is paired with feature i + r/2.

    Args:
        cos, sin: each `[s, r]` or `[b, s, r]`.
        interleaved: pair features 2i and 2i + 1. The result has the first of all pairs, then the
            second ones: an order of features that cancels in the products of queries and keys.
    """
    size = cos.shape[-1]
    remainder = x[..., size:]
    features = x[..., :size].float()
    if interleaved:
        features = features.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if runs_eagerly(features):
        out = _Rotation.apply(features, cos, sin)
    else:
        first, second = features.chunk(2, dim=-1)
        quarter_turn = torch.cat((-second, first), dim=-1)
        out = features * cos + quarter_turn * sin
    out = out.type_as(x)
    return torch.cat((out, remainder), dim=-1) if remainder.shape[-1] else out


class _Rotation(torch.autograd.Function):
    """`apply(x, cos, sin)`: the rotation in fewer passes, and bit for bit the same. Its gradient is
    rotated back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate all features of `x`, forward or (-1) back.

    Args:
        cos, sin: equal for the two features of a pair.
    """
    out = x * cos
    first, second = out.chunk(2, dim=-1)
    products = (x * sin).chunk(2, dim=-1)
    first.sub_(products[1], alpha=direction)
    second.add_(products[0], alpha=direction)
    return out
