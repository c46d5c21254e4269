"""Attention within packed documents, by the kernels for sequences of variable length.

The rows of a batch are laid end to end, and a kernel gets the documents' first tokens. A mask would
cost a read per block of scores, and FlexAttention a compilation. CUDA only, 16-bit types only.

Shapes: b batch, s sequence, t = b * s tokens, h query heads, k key-value heads, d width of queries
and keys, e width of values.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.attention.dense import join_sinks, register_backward
from torchtitan.models.attention.interface import Scores
from torchtitan.models.attention.kernels import Gradients, aligned, widen
from torchtitan.utils.device import copy_to


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of one batch, in shapes that are the same for all: blocks compile once."""

    starts: Tensor
    """`[t + 1]` int32 on the compute device: the first token of each document, then only t."""
    sizes: Tensor
    """`[2]` on the host: bounds on the number of documents, and on the tokens of the longest.

    They are powers of two where possible, because cuDNN prepares a kernel for every pair.
    """


def pack_documents(documents: Tensor, device: torch.device) -> PackedDocuments:
    """Pack documents `[b, s]`, which are on the host, without waiting for the device."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    tokens = documents.numel()
    begins = first.flatten().nonzero().flatten()
    longest = int(begins.diff(append=torch.tensor([tokens])).max())
    starts = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    starts[: len(begins)] = begins
    count = min(_power_of_two(len(begins)), tokens)
    longest = min(_power_of_two(longest), documents.shape[1])
    return PackedDocuments(copy_to(starts, device), torch.tensor([count, longest]))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention within documents: q `[b, h, s, d]`, k `[b, k, s, d]`, v `[b, k, s, e]` ->
    `[b, h, s, e]`.

    Args:
        scores: with `PackedDocuments` as the mask.
        sinks: as for `Attend`.
    """
    documents, window, scale, _ = scores.scaled(q.shape[-1])
    assert isinstance(documents, PackedDocuments)
    rows = q.shape[0]
    size = v.shape[-1]
    width = aligned(max(q.shape[-1], size))  # one for all
    q, k, v = (widen(x.transpose(1, 2).flatten(0, 1), width) for x in (q, k, v))
    out, _ = document_attention(
        q, k, v, sinks, starts=documents.starts, sizes=documents.sizes, window=window, scale=scale
    )
    return out[..., :size].unflatten(0, (rows, -1)).transpose(1, 2)


@torch.library.custom_op("torchtitan::document_attention", mutates_args=())
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    starts: Tensor,
    sizes: Tensor,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn` with sizes that the compiler doesn't specialize on.

    Args:
        q: `[t, h, d]`; k and v `[t, k, d]`.
        sinks, window: as for `attend_variant`.
        starts, sizes: of `PackedDocuments`.

    Returns:
        The output `[t, h, d]` and the scores' log-sum-exp `[h, t]`, which the backward needs.
    """
    bounds, longest, reach, kernel = _plan(q, k, v, starts, sizes, window)
    documents = (bounds, bounds, longest, longest)
    out, lse, _ = torch.ops.torch_attn._varlen_attn(
        q, k, v, *documents, window is None, scale, reach, **kernel
    )
    return join_sinks(out, lse, sinks)


def _plan(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, sizes: Tensor, window: int | None
) -> tuple[Tensor, int, list[int], dict[str, Any]]:
    """First tokens, length of the longest document, keys that a query sees before and after itself
    (-1: all), and from torch 2.15 on the preferred kernel.
    """
    from torch.nn.attention import varlen  # imports dynamo: two seconds

    count, longest = sizes.tolist()
    bounds = starts[: count + 1]
    reach = [-1 if window is None else window - 1, 0]
    select = getattr(varlen, "_select_backend", None)
    if select is None:
        return bounds, longest, reach, {}
    with torch.enable_grad():
        # An operator's inputs need no gradient, but some kernels have no backward.
        probe = q.detach().requires_grad_()
        kernel = select(probe, k, v, bounds, bounds, longest, reach)
    return bounds, longest, reach, {"backend": kernel}


@document_attention.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("torchtitan::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    sizes: Tensor,
    window: int | None,
    scale: float,
) -> Gradients:
    """Gradients of `document_attention`."""
    bounds, longest, reach, kernel = _plan(q, k, v, starts, sizes, window)
    documents = (bounds, bounds, longest, longest)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        grad, q, k, v, out, lse, *documents, window is None, no_dropout, scale, reach, **kernel
    )


@document_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


register_backward(document_attention, document_attention_backward)
