"""Attention under FlexAttention's block masks: CUDA in fp32, or some of a row's queries.

Shapes: b batch, h query heads, k key-value heads, s queries, S keys, d width of queries and keys, e
width of values.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.attention.interface import Scores, WindowMasks


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """q `[b, h, s, d]`, k `[b, k, S, d]`, v `[b, k, S, e]` -> `[b, h, s, e]`.

    Args:
        scores: with `WindowMasks` as the mask.
        sinks: as for `Attend`.

    Raises:
        ValueError: no mask was made for this window.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    mask, window, scale, _ = scores.clip_window(k.shape[2])
    assert isinstance(mask, WindowMasks)
    if window not in mask.windows:
        raise ValueError(
            f"no mask of documents was made for a window of {window}; list the windows of all "
            "layers in the model's attribute `windows`"
        )
    options: dict[str, Any] = {
        "block_mask": mask.masks[mask.windows.index(window)],
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if sinks is None:
        return _flex_attention()(q, k, v, **options)
    out, aux = _flex_attention()(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # The docstring of `attention/dense.py` explains the factor. FlexAttention differentiates its
    # log-sum-exp.
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _flex_attention() -> Callable[..., Any]:
    """FlexAttention: compiled with the block that is being compiled, or on its own."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
