"""Attention with an explicit softmax, and tensors to compare it with."""

import torch


def reference(q, k, v, mask=None, window=None, scale=None, offset=0, sinks=None):
    """The softmax of `Scores` spelled out, with the sink as one more key whose value is zero."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(q.shape[2])[:, None] + offset - torch.arange(k.shape[2])
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if mask is not None:
        visible = visible & mask
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def inputs(dtype=torch.float64, s=40, keys=None, heads=4, kv_heads=2, d=12, e=8, grad=False):
    generator = torch.Generator().manual_seed(1)

    def make(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_(grad)

    keys = keys or s
    return make(2, heads, s, d), make(2, kv_heads, keys, d), make(2, kv_heads, keys, e), make(heads)


def documents(s):
    return (torch.arange(s) // 7 + torch.arange(2)[:, None]).contiguous()
