"""Layers that model families share.

Shapes: b batch, s sequence, h query heads, k key-value heads, d head size.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention_kernel import is_halved
from torchtitan.models.attention_op import attend_variant
from torchtitan.models.flex import attend_blocks
from torchtitan.models.packed_attention import PackedDocuments, attend_documents, pack_documents
from torchtitan.utils.logging import logger

Mask = Any
"""Result of `document_mask`: a tensor, `PackedDocuments`, FlexAttention's `BlockMask`, or a
`DocumentMask` with one of them.
"""


class DocumentMask(NamedTuple):
    """For models that also mix tokens by other means than attention (`reads_documents`)."""

    mask: Mask
    documents: Tensor
    """`[b, s]`, the document of each token that this rank holds, on the compute device."""


class Attend(Protocol):
    """Attention: q `[b, h, s, d]`, k `[b, k, s, d]`, v `[b, k, s, e]` -> `[b, h, s, e]`.

    Causal without a mask.

    Args:
        window: a query sees itself and the `window - 1` tokens before it. None: all before it.
        scale: factor of the scores. None: `d ** -0.5`.
        sinks: `[h]`, learned logits that take part in each head's softmax and have no value.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


def _is_plain(
    q: Tensor, v: Tensor, mask: Mask | None, window: int | None, sinks: Tensor | None
) -> bool:
    """Whether torch's scaled dot-product attention does this, and no slower than
    `attend_variant`.
    """
    known = window is None and sinks is None and q.shape[-1] == v.shape[-1]
    return known and not (q.device.type == "cpu" and _gains_on_cpu(q, mask))


def _gains_on_cpu(q: Tensor, mask: Mask | None) -> bool:
    """Whether the CPU computes attention to these queries faster in fp32 or in halves."""
    return q.element_size() == 2 or (mask is None and is_halved(q.shape[2]))


def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    if window is not None and window >= k.shape[2]:
        window = None
    if not _is_plain(q, v, mask, window, sinks):
        offset = 0 if q.shape[2] == k.shape[2] else None
        return attend_variant(q, k, v, mask, window=window, scale=scale, sinks=sinks, offset=offset)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _attend_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    if mask is None:
        return _attend_dense(q, k, v, window=window, scale=scale, sinks=sinks)
    if isinstance(mask, PackedDocuments):
        return attend_documents(q, k, v, mask, window=window, scale=scale, sinks=sinks)
    return attend_blocks(q, k, v, mask, window=window, scale=scale, sinks=sinks)


def attention_backend(device_type: str) -> Attend:
    """Attention for a device: SDPA, with the kernel that torch chooses. Selected once, at build."""
    if device_type != "cuda":
        return _attend_dense
    _activate_flash_attention_3()
    return _attend_cuda


@functools.cache
def _activate_flash_attention_3() -> None:
    """Let torch replace its FlashAttention 2 by version 3 on Hopper, if that is installed."""
    if not find_spec("flash_attn_interface") or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability()[0] == 9:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
        logger.info("Attention: torch's flash kernels are FlashAttention 3")


@functools.cache
def _compiled_create_block_mask() -> Callable[..., Mask]:
    """`create_block_mask`, which takes a tensor `[s, S]` of queries and keys unless compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


def document_mask(
    documents: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    attending: Tensor | None = None,
    with_documents: bool = False,
) -> Mask:
    """A causal mask within documents: a token sees itself and earlier tokens of its document.

    Args:
        documents: `[b, S]` on the host, the document that each token of a whole row belongs to.
        positions: `[s]` on the compute device, positions of the model's tokens in the row.
        dtype: type of queries, keys and values.
        attending: the queries' positions, if they aren't the tokens'.
        with_documents: make a `DocumentMask`.

    Returns:
        On CUDA `PackedDocuments`, or, for fp32 or some of a row's queries, a `BlockMask`; elsewhere
        a boolean tensor `[b, 1, s, S]` (FlexAttention has no backward on the CPU).
    """
    mask = _mask_of(documents, positions if attending is None else attending, dtype)
    if not with_documents:
        return mask
    own = documents[:, positions.cpu()]
    return DocumentMask(mask, own.to(positions.device, non_blocking=True))


def reads_documents(model: nn.Module) -> bool:
    """Whether a model asks for a `DocumentMask`, by an attribute of this name."""
    return bool(getattr(model, "reads_documents", False))


def _mask_of(documents: Tensor, positions: Tensor, dtype: torch.dtype) -> Mask:
    device = positions.device
    whole_rows = len(positions) == documents.shape[1]
    if device.type == "cuda" and whole_rows and dtype in (torch.float16, torch.bfloat16):
        return pack_documents(documents, device)
    if device.type != "cpu":  # from pageable memory, the host would wait for the copy
        documents = documents.pin_memory()
    documents = documents.to(device, non_blocking=True)
    if device.type == "cuda":
        return block_mask(documents, positions, _compiled_create_block_mask())
    keys = torch.arange(documents.shape[1], device=device)
    same = documents[:, positions, None] == documents[:, None, :]
    causal = positions[:, None] >= keys
    return (same & causal)[:, None]


def block_mask(documents: Tensor, positions: Tensor, create: Callable[..., Mask]) -> Mask:
    """`document_mask` for FlexAttention, on any device.

    Args:
        create: FlexAttention's `create_block_mask`.
    """

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        position = positions[q]
        return (position >= k) & (documents[b, position] == documents[b, k])

    rows, seq_len = documents.shape
    return create(visible, rows, None, len(positions), seq_len, device=documents.device.type)


class PerHead(nn.Module):
    """A parameter with an entry, or some entries, for each head: `forward() -> [heads, ...]`.

    It is a module so that tensor parallelism can give it a style, `per_head`: each rank then holds
    and returns the entries of its own heads.
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        return self.weight


class TokenLinear(nn.Module):
    """A linear layer whose output heads share: `[b, s, inputs] -> [b, s, outputs]`.

    Tensor parallelism has each rank apply all of it to its own tokens (style `gate`).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, *self.parameters())

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output, with these in place of its parameters."""
        return F.linear(x, weight, bias)
