"""Attention within documents that are packed one after another, by the kernels for sequences of
variable length.

The rows of a batch are laid end to end, and a kernel gets the documents' first tokens. A mask would
cost a read per block of scores, and FlexAttention a compilation. CUDA only, 16-bit types only.

Shapes: b batch, s sequence, t = b s tokens of the batch, h query heads, k key-value heads, d head
size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CAUSAL = [-1, 0]
"""Window of keys that a query sees: all before it, none after."""


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of one batch. Tensors of the same shapes for all batches, so a compiled block
    serves them all.
    """

    starts: Tensor
    """`[t + 1]` int32 on the compute device: the first token of each document, and after the last,
    t throughout.
    """
    sizes: Tensor
    """`[2]` on the host: the number of documents, and of tokens in the longest. Both are upper
    bounds, powers of two where possible, because cuDNN prepares a kernel for every pair.
    """


def pack_documents(documents: Tensor, device: torch.device) -> PackedDocuments:
    """The documents of `documents` `[b, s]`, which is on the host: the device is never waited
    for.
    """
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    tokens = documents.numel()
    begins = first.flatten().nonzero().flatten()
    longest = int(begins.diff(append=torch.tensor([tokens])).max())
    starts = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    starts[: len(begins)] = begins
    sizes = min(_power_of_two(len(begins)), tokens), min(_power_of_two(longest), documents.shape[1])
    if device.type == "cuda":
        starts = starts.pin_memory()
    return PackedDocuments(starts.to(device, non_blocking=True), torch.tensor(sizes))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedDocuments,
) -> Tensor:
    """Causal attention within documents: q `[b, h, s, d]`, k and v `[b, k, s, d]` -> `[b, h, s,
    d]`.
    """
    rows = q.shape[0]
    size = q.shape[-1]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if size % 8:  # the kernels' head sizes are multiples of 8; zeros change no product
        q, k, v = (F.pad(x, (0, -size % 8)) for x in (q, k, v))
    out, _ = document_attention(q, k, v, documents.starts, documents.sizes, size**-0.5)
    return out[..., :size].unflatten(0, (rows, -1)).transpose(1, 2)


@torch.library.custom_op("torchtitan::document_attention", mutates_args=())
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    sizes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn` with sizes from a host tensor, which the compiler
    doesn't specialize on.

    Args:
        q: `[t, h, d]`; k and v `[t, k, d]`.
        starts, sizes: of `PackedDocuments`.

    Returns:
        The output `[t, h, d]` and the scores' log-sum-exp `[h, t]`, which the backward needs.
    """
    bounds, longest, kernel = _plan(q, k, v, starts, sizes)
    of_documents = bounds, bounds, longest, longest
    out, lse, _ = torch.ops.torch_attn._varlen_attn(
        q, k, v, *of_documents, True, scale, _CAUSAL, **kernel
    )
    return out, lse


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    sizes: Tensor,
) -> tuple[Tensor, int, dict[str, Any]]:
    """First tokens, length of the longest document, and from torch 2.15 on the kernel that torch
    prefers.
    """
    from torch.nn.attention import varlen  # imports dynamo: two seconds

    count, longest = sizes.tolist()
    bounds = starts[: count + 1]
    select = getattr(varlen, "_select_backend", None)
    if select is None:
        return bounds, longest, {}
    with torch.enable_grad():
        probe = (
            q.detach().requires_grad_()
        )  # an operator's inputs need none, and some kernels have no backward
        return bounds, longest, {"backend": select(probe, k, v, bounds, bounds, longest, _CAUSAL)}


@document_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
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
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `document_attention`."""
    bounds, longest, kernel = _plan(q, k, v, starts, sizes)
    of_documents = bounds, bounds, longest, longest
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        grad, q, k, v, out, lse, *of_documents, True, no_dropout, scale, _CAUSAL, **kernel
    )


@document_attention_backward.register_fake
def _(grad: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x) for x in tensors[:3])
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, sizes, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, starts, sizes)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *document_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


document_attention.register_autograd(_backward, setup_context=_save)
