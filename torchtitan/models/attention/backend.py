"""The choice of attention's kernel on a device, and the masks of documents.

Shapes: b batch, s sequence, S the whole row, h query heads, k key-value heads, d head size.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.models.attention.dense import attend_variant
from torchtitan.models.attention.flex import attend_blocks
from torchtitan.models.attention.interface import (
    CAUSAL,
    Attend,
    DocumentMask,
    Mask,
    Scores,
    WindowMasks,
)
from torchtitan.models.attention.kernels import repeat_heads
from torchtitan.models.attention.packed import PackedDocuments, attend_documents, pack_documents
from torchtitan.utils.device import copy_to
from torchtitan.utils.logging import logger


def _is_plain(q: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None) -> bool:
    """Whether to use torch's attention: it computes this, no slower than `attend_variant`."""
    plain = scores.window is None and sinks is None and q.shape[-1] == v.shape[-1]
    return plain and not _gains_in_fp32(q)


def _gains_in_fp32(q: Tensor) -> bool:
    """Whether attention to these queries is faster in fp32: in 16 bits on the CPU."""
    return q.device.type == "cpu" and q.element_size() == 2


def _attend_dense(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
) -> Tensor:
    scores = scores.clip_window(k.shape[2])
    if not _is_plain(q, v, scores, sinks):
        offset = 0 if q.shape[2] == k.shape[2] else None
        return attend_variant(q, k, v, scores.at_offset(offset), sinks=sinks)
    mask, _, scale, _ = scores
    grouped = q.shape[1] != k.shape[1]
    if grouped and _repeats_heads(q.device.type, q.dtype):
        k = repeat_heads(k, q)
        v = repeat_heads(v, q)
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _repeats_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Whether to repeat keys and values: no fast kernel here supports grouped queries, and torch
    would keep a matrix of all scores.

    In deterministic mode it has to, as the fast kernel's backward isn't deterministic.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    return device_type == "cuda" and dtype == torch.float32 and not deterministic


def _attend_cuda(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
) -> Tensor:
    if scores.mask is None:
        return _attend_dense(q, k, v, scores, sinks=sinks)
    if isinstance(scores.mask, PackedDocuments):
        return attend_documents(q, k, v, scores, sinks=sinks)
    return attend_blocks(q, k, v, scores, sinks=sinks)


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
        logger.info(
            "Attention: FlashAttention 3 replaces torch's flash kernel, which computes packed "
            "documents and windows; elsewhere torch prefers cuDNN's in 16 bits"
        )


@functools.cache
def _compiled_create_block_mask() -> Callable[..., Mask]:
    """`create_block_mask`, which allocates `[s, S]` for queries and keys unless compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


def document_mask(
    documents: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    attending: Tensor | None = None,
    with_documents: bool = False,
    windows: Sequence[int | None] = (None,),
) -> Mask:
    """A causal mask within documents: a token sees itself and earlier tokens of its document.

    Args:
        documents: `[b, S]` on the host, the document that each token of a whole row belongs to.
        positions: `[s]` on the compute device, positions of the model's tokens in the row.
        dtype: type of queries, keys and values.
        attending: the queries' positions, if they aren't the tokens'.
        with_documents: make a `DocumentMask`.
        windows: of the layers, as `windows_of` returns them.

    Returns:
        On CUDA `PackedDocuments`, or, for fp32 or some of a row's queries, `WindowMasks`; elsewhere
        a boolean tensor `[b, 1, s, S]` (FlexAttention has no backward on the CPU).
    """
    queries = positions if attending is None else attending
    mask = _causal_mask(documents, queries, dtype, windows)
    if not with_documents:
        return mask
    # Selected on the device, because the host would wait for its positions.
    local = copy_to(documents, positions.device).index_select(1, positions)
    return DocumentMask(mask, local)


def _causal_mask(
    documents: Tensor, positions: Tensor, dtype: torch.dtype, windows: Sequence[int | None]
) -> Mask:
    device = positions.device
    whole_rows = len(positions) == documents.shape[1]
    if device.type == "cuda" and whole_rows and dtype in (torch.float16, torch.bfloat16):
        return pack_documents(documents, device)
    documents = copy_to(documents, device)
    if device.type == "cuda":
        return window_masks(documents, positions, windows, _compiled_create_block_mask())
    keys = torch.arange(documents.shape[1], device=device)
    same = documents[:, positions, None] == documents[:, None, :]
    causal = positions[:, None] >= keys
    return (same & causal)[:, None]


def window_masks(
    documents: Tensor, positions: Tensor, windows: Sequence[int | None], create: Callable[..., Mask]
) -> WindowMasks:
    """`document_mask` for FlexAttention, on any device. Its kernel skips blocks of 128 queries and
    keys of which no query sees a key.

    Args:
        create: FlexAttention's `create_block_mask`.
    """
    rows, seq_len = documents.shape

    def mask_of(window: int | None) -> Mask:
        reach = seq_len if window is None else window

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            position = positions[q]
            near = (position >= k) & (position - k < reach)
            return near & (documents[b, position] == documents[b, k])

        return create(visible, rows, None, len(positions), seq_len, device=documents.device.type)

    lengths = [Scores(window=window).clip_window(seq_len).window for window in windows]
    distinct = tuple(dict.fromkeys(lengths))
    return WindowMasks(distinct, tuple(map(mask_of, distinct)))
