"""Layers that model families share.

Shapes: b batch, s sequence, h query heads, k key-value heads, d head size.
"""

import functools
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan.models.attention_op import attend_variant
from torchtitan.models.packed_attention import PackedDocuments, attend_documents, pack_documents
from torchtitan.utils.logging import logger
from torchtitan.utils.torch_compat import torch_is_before_2_13

Mask = Any
"""Result of `document_mask`: a tensor, `PackedDocuments`, or FlexAttention's `BlockMask`."""


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
    q: Tensor,
    v: Tensor,
    window: int | None,
    sinks: Tensor | None,
) -> bool:
    """Whether this is what torch calls scaled dot-product attention, in all of its kernels."""
    return window is None and sinks is None and q.shape[-1] == v.shape[-1]


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
    if window is not None and window >= q.shape[2]:
        window = None
    if not _is_plain(q, v, window, sinks):
        return attend_variant(q, k, v, mask, window=window, scale=scale, sinks=sinks)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=grouped,
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
    grouped = q.shape[1] != k.shape[1]
    return _compiled_flex_attention()(
        q,
        k,
        v,
        block_mask=mask,
        scale=scale,
        enable_gqa=grouped,
    )


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


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
) -> Mask:
    """A causal mask within documents: a token sees itself and earlier tokens of its document.

    Args:
        documents: `[b, S]` on the host, the document that each token of a whole row belongs to.
        positions: `[s]` on the compute device, positions of the queries in the row.
        dtype: type of queries, keys and values.

    Returns:
        On CUDA `PackedDocuments`, or, for fp32 or some of a row's queries, a `BlockMask`; elsewhere
        a boolean tensor `[b, 1, s, S]` (FlexAttention has no backward on the CPU).
    """
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


def block_mask(
    documents: Tensor,
    positions: Tensor,
    create: Callable[..., Mask],
) -> Mask:
    """`document_mask` for FlexAttention, on any device.

    Args:
        create: FlexAttention's `create_block_mask`.
    """

    def visible(
        b: Tensor,
        h: Tensor,
        q: Tensor,
        k: Tensor,
    ) -> Tensor:
        position = positions[q]
        return (position >= k) & (documents[b, position] == documents[b, k])

    rows, seq_len = documents.shape
    return create(visible, rows, None, len(positions), seq_len, device=documents.device.type)


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Frequencies of RoPE (Su et al., arXiv:2104.09864): `[d / 2]`, in radians per position."""
    features = torch.arange(0, head_dim, 2, dtype=torch.float32)
    return theta ** -(features / head_dim)


def scale_frequencies(
    freqs: Tensor,
    factor: float,
    low: float,
    high: float,
    original_seq_len: int,
) -> Tensor:
    """Llama 3.1's RoPE scaling: low frequencies are divided by `factor`, high ones kept.

    Args:
        low, high: numbers of periods in `original_seq_len` between which to interpolate.
    """
    turns = original_seq_len * freqs / (2 * math.pi)  # periods within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / factor)


def rope_cache(freqs: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at every position, `[s, d]` in fp32, in half-split layout."""
    positions = torch.arange(seq_len, dtype=torch.float32)
    angles = torch.outer(positions, freqs).repeat(1, 2)
    return angles.cos(), angles.sin()


def apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate `x` `[b, s, heads, d]`, in fp32, by `cos` and `sin`, each `[s, d]` or `[b, s, d]`.

    Feature i is paired with feature i + d/2.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    out = x.float() * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)
    return out.type_as(x)


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang & Sennrich, arXiv:1910.07467) over the last dimension, with a weight.

    torch has a fused kernel on CUDA. On the CPU it runs several operations, each of which keeps its
    input for the backward; in fp32 and eager mode, this one keeps its input and one number per row,
    and makes fewer passes.
    """

    def forward(self, x: Tensor) -> Tensor:
        fp32_on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
        eager = not is_traceable_wrapper_subclass(x) and not torch.compiler.is_compiling()
        if fp32_on_cpu and eager and not torch_is_before_2_13():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        products = gradient * normal
        # The part that the normalization takes out.
        along = (products @ weight).unsqueeze(-1).div_(x.shape[-1])
        of_x = (gradient * weight).addcmul_(normal, along, value=-1).mul_(scale)
        return of_x, products.flatten(0, -2).sum(0), None


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


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): `w2(silu(w1(x)) * w3(x))`, on `[b, s, dim]`."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
