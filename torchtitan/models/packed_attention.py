"""Attention within packed documents, by the kernels for sequences of variable length.

The rows of a batch are laid end to end, and a kernel gets the documents' first tokens. A mask would
cost a read per block of scores, and FlexAttention a compilation. CUDA only, 16-bit types only.

Shapes: b batch, s sequence, t = b * s tokens, h query heads, k key-value heads, d head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import CustomOpDef

_CAUSAL = [-1, 0]
"""Window of keys that a query sees: all before it, none after."""


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
    if device.type == "cuda":
        starts = starts.pin_memory()
    return PackedDocuments(starts.to(device, non_blocking=True), torch.tensor([count, longest]))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: PackedDocuments,
) -> Tensor:
    """Causal attention within documents: q `[b, h, s, d]`, k and v `[b, k, s, d]` -> like q."""
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
    """`torch.nn.attention.varlen.varlen_attn` with sizes that the compiler doesn't specialize on.

    Args:
        q: `[t, h, d]`; k and v `[t, k, d]`.
        starts, sizes: of `PackedDocuments`.

    Returns:
        The output `[t, h, d]` and the scores' log-sum-exp `[h, t]`, which the backward needs.
    """
    bounds, longest, kernel = _plan(q, k, v, starts, sizes)
    documents = (bounds, bounds, longest, longest)
    out, lse, _ = torch.ops.torch_attn._varlen_attn(
        q, k, v, *documents, True, scale, _CAUSAL, **kernel
    )
    return out, lse


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    sizes: Tensor,
) -> tuple[Tensor, int, dict[str, Any]]:
    """First tokens, length of the longest document, and from torch 2.15 on the preferred kernel."""
    from torch.nn.attention import varlen  # imports dynamo: two seconds

    count, longest = sizes.tolist()
    bounds = starts[: count + 1]
    select = getattr(varlen, "_select_backend", None)
    if select is None:
        return bounds, longest, {}
    with torch.enable_grad():
        # An operator's inputs need no gradient, but some kernels have no backward.
        probe = q.detach().requires_grad_()
        kernel = select(probe, k, v, bounds, bounds, longest, _CAUSAL)
    return bounds, longest, {"backend": kernel}


@document_attention.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("torchtitan::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    sizes: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `document_attention`."""
    bounds, longest, kernel = _plan(q, k, v, starts, sizes)
    documents = (bounds, bounds, longest, longest)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        grad, q, k, v, out, lse, *documents, True, no_dropout, scale, _CAUSAL, **kernel
    )


@document_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def register_backward(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Differentiate an operator of attention.

    Args:
        forward: `(q, k, v, *rest) -> (out, lse)`, where `rest` holds tensors before other values.
        backward: `(grad, q, k, v, *tensors of rest, out, lse, *others of rest) -> (dq, dk, dv)`.
    """

    def save(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, Tensor],
    ) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.others = inputs[len(tensors) :]
        ctx.without_gradient = [None] * (len(inputs) - 3)
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    def differentiate(
        ctx: Any,
        grad: Tensor,
        _: Tensor,
    ) -> tuple[Tensor | None, ...]:
        return *backward(grad, *ctx.saved_tensors, *ctx.others), *ctx.without_gradient

    forward.register_autograd(differentiate, setup_context=save)


register_backward(document_attention, document_attention_backward)
