"""Attention of some queries to some keys within a causal window, forward and backward.

Kernels that know windows skip what no query sees; others get parts of the block, and a mask.

Query i of a block is at position i + offset of its keys: without a window it sees keys up to that
position, with one the last `window` of them. If the offset is None, a mask alone decides. Shapes
are those of `attention_kernel`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.models.attention_kernel import (
    biased_backward,
    biased_forward,
    block_backward,
    block_forward,
    no_seed,
    widen,
)

aten = torch.ops.aten

_QUERIES = 256
"""Queries that share one range of keys, where a kernel takes a mask instead of a window."""
_FLASH_WIDTH = 256
"""The widest head of FlashAttention."""


class Part(NamedTuple):
    """The queries of a block that see any key, and the keys that any query sees."""

    rows: slice
    columns: slice
    offset: int | None
    """Position of the first of these queries among these keys."""


def seen(queries: int, keys: int, offset: int, window: int | None) -> Part | None:
    """The part of a block that a causal window leaves; None: nothing."""
    reach = keys + queries + abs(offset) if window is None else window
    first = max(0, -offset)
    last = min(queries, keys + reach - 1 - offset)  # exclusive
    if first >= last:
        return None
    begin = max(0, first + offset - reach + 1)
    end = min(keys, last + offset)
    return Part(slice(first, last), slice(begin, end), first + offset - begin)


def _shape(queries: int, keys: int, offset: int | None, window: int | None) -> str:
    """`causal` or `full` if the block needs no mask, otherwise `band`."""
    if offset is None:
        return "band"
    reach = offset + queries if window is None else window
    if reach >= offset + queries:
        if offset >= keys - 1:
            return "full"
        if offset == 0 and queries == keys:
            return "causal"
    return "band"


def band_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    offset: int | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention within `window`: its output `[b, h, s, e]`, and its log-sum-exp.

    Every query must see a key.

    Args:
        mask: `[b, 1, s, S]`, true where a query may see a key.
    """
    shape = _shape(q.shape[2], k.shape[2], offset, window)
    if mask is None and shape != "band":
        return block_forward(q, k, v, shape == "causal", scale)
    if mask is None and offset is not None and _has_windows(q, v):
        return _flash_forward(q, k, v, offset, window, scale)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for part in _parts(q, k, offset, window):
        rows, columns, _ = part
        out[:, :, rows], lse[:, :, rows] = biased_forward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], _bias(q, part, mask, window), scale
        )
    return out, lse


def band_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    offset: int | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `band_forward`. `out` and `lse` may be merged from several blocks."""
    shape = _shape(q.shape[2], k.shape[2], offset, window)
    if mask is None and shape != "band":
        return block_backward(grad, q, k, v, out, lse, shape == "causal", scale)
    if mask is None and offset is not None and _has_windows(q, v):
        return _flash_backward(grad, q, k, v, out, lse, offset, window, scale)
    sums = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=sums, device=q.device) for x in (k, v))
    for part in _parts(q, k, offset, window):
        rows, columns, _ = part
        grads = biased_backward(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            out[:, :, rows],
            lse[:, :, rows].contiguous(),
            _bias(q, part, mask, window),
            scale,
        )
        dq[:, :, rows] = grads[0]
        dk[:, :, columns] += grads[1]
        dv[:, :, columns] += grads[2]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _has_windows(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention, which skips what lies outside of a window, takes these tensors."""
    widest = max(q.shape[-1], v.shape[-1])
    return q.device.type != "cpu" and q.element_size() == 2 and widest <= _FLASH_WIDTH


def _flash_window(q: Tensor, k: Tensor, offset: int, window: int | None) -> dict[str, int]:
    """FlashAttention's window: keys before and after a query's, where the last ones coincide."""
    after = offset - (k.shape[2] - q.shape[2])
    before = -1 if window is None else window - 1 - after
    assert after >= 0, "keys that no query sees"
    assert window is None or before >= 0, "queries that see no key"
    return {"window_size_left": before, "window_size_right": after}


def _flash_width(q: Tensor, v: Tensor) -> int:
    """The kernels' widths are multiples of 8, one for all; zeros change no product."""
    widest = max(q.shape[-1], v.shape[-1])
    return widest + -widest % 8


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, offset: int, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    width = _flash_width(q, v)
    tokens = [widen(x, width).transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = aten._flash_attention_forward(
        *tokens,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        False,
        False,
        scale=scale,
        **_flash_window(q, k, offset, window),
    )
    return out.transpose(1, 2)[..., : v.shape[-1]], lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offset: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    width = _flash_width(q, v)
    tokens = [widen(x, width).transpose(1, 2) for x in (grad, q, k, v, out)]
    seed = no_seed(q)
    dq, dk, dv = aten._flash_attention_backward(
        *tokens,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        False,
        seed,
        seed,
        scale=scale,
        **_flash_window(q, k, offset, window),
    )
    size = q.shape[-1]
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    return dq[..., :size], dk[..., :size], dv[..., : v.shape[-1]]


def _parts(q: Tensor, k: Tensor, offset: int | None, window: int | None) -> Iterator[Part]:
    """Cut a block along its queries, so that its cost is queries x window."""
    for first in range(0, q.shape[2], _QUERIES):
        rows = min(_QUERIES, q.shape[2] - first)
        if offset is None:
            yield Part(slice(first, first + rows), slice(0, k.shape[2]), None)
            continue
        part = seen(rows, k.shape[2], offset + first, window)
        assert part is not None
        assert part.rows == slice(0, rows), "queries that see no key"
        yield part._replace(rows=slice(first, first + rows))


def _bias(q: Tensor, part: Part, mask: Tensor | None, window: int | None) -> Tensor:
    """What to add to the scores of a part, `[s, S]` or `[b, 1, s, S]`: 0, or -inf if invisible."""
    rows = part.rows.stop - part.rows.start
    columns = part.columns.stop - part.columns.start
    visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    if part.offset is not None:
        visible.tril_(part.offset)
        if window is not None:
            visible.triu_(part.offset - window + 1)
    if mask is not None:
        visible = visible & mask[:, :, part.rows, part.columns]
    # A kernel on CUDA asks for rows that begin at multiples of 16 bytes.
    width = columns + -columns % 8
    bias = q.new_zeros(*visible.shape[:-1], width)[..., :columns]
    return bias.masked_fill_(visible.logical_not_(), float("-inf"))
