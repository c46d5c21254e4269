"""Attention under FlexAttention's block masks: CUDA in fp32, or some of a row's queries.

Shapes: b batch, h query heads, k key-value heads, s queries, S keys, d width of queries and keys, e
width of values.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.attention.interface import Scores


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    sinks: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """q `[b, h, s, d]`, k `[b, k, S, d]`, v `[b, k, S, e]` -> `[b, h, s, e]`.

    Whole blocks are skipped by the mask, not by the window, which costs a comparison per score.

    Args:
        scores: with a `BlockMask` as the mask.
        sinks: as for `Attend`.
        positions: `[s]`, the queries' positions among the keys, for the window. None: 0, 1, 2, ...
    """
    from torch.nn.attention.flex_attention import AuxRequest

    grouped = q.shape[1] != k.shape[1]
    mask, window, scale, _ = scores
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": grouped}
    if window is not None:
        options["score_mod"] = _window_mod(window, positions)
    if sinks is None:
        return _flex_attention()(q, k, v, **options)
    out, aux = _flex_attention()(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # The docstring of `attention/dense.py` explains the factor. FlexAttention differentiates its
    # log-sum-exp.
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _window_mod(window: int, positions: Tensor | None) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        position = q if positions is None else positions[q]
        return torch.where(position - k < window, score, float("-inf"))

    return score_mod


@cache
def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
