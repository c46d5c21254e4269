"""The largest attention score of each head, recorded beside attention while a model trains.

Attention kernels don't return it, so queries and keys are multiplied once more, a block of
queries at a time: no matrix of all scores exists.

Shapes: b batch, h query heads, k key-value heads, s queries, S keys, d head size.
"""

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol

from torchtitan.models.attention.interface import CAUSAL, Attend, Scores
from torchtitan.models.attention.packed import PackedDocuments
from torchtitan.parallel.context.layout import RowLayout

_AT_ONCE = 2**26
"""Scores that exist at a time."""


@torch.library.custom_op("torchtitan::max_logits", mutates_args=())
def max_logits(
    q: Tensor,
    k: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    scale: float,
) -> Tensor:
    """Each head's largest score of q `[b, h, s, d]` and k `[b, k, S, d]`: `[h]`, fp32.

    Args:
        positions: `[s]`, the queries' positions among the keys. None: 0, 1, 2, ...
        mask: `[b, 1, s, S]`, true where a query may see a key.
        starts: `PackedDocuments.starts`, instead of a mask.
        window: as in `Scores`.
    """
    batch, heads, queries, _ = q.shape
    count = k.shape[2]
    keys = torch.arange(count, device=q.device)
    in_order = positions is None
    query_positions = torch.arange(queries, device=q.device) if positions is None else positions
    documents = None if starts is None else _documents(starts, batch, count)
    grouped_queries = q.unflatten(1, (k.shape[1], -1))
    largest = torch.full((heads,), -torch.inf, device=q.device)
    size = max(16, _AT_ONCE // (batch * heads * count))
    for first in range(0, queries, size):
        rows = slice(first, first + size)
        visible_keys = slice(0, min(first + size, count) if in_order else count)
        position = query_positions[rows, None]
        visible = position >= keys[visible_keys]
        if window is not None:
            visible = visible & (position - keys[visible_keys] < window)
        visible = visible[None, None]
        if mask is not None:
            visible = visible & mask[:, :, rows, visible_keys]
        if documents is not None:
            same = documents[:, query_positions[rows], None] == documents[:, None, visible_keys]
            visible = visible & same[:, None]
        scores = grouped_queries[:, :, :, rows] @ k[:, :, None, visible_keys].mT
        scores = scores.masked_fill_(~visible[:, :, None], -torch.inf)
        block_largest = scores.amax(dim=(0, 3, 4)).flatten().float() * scale
        torch.maximum(largest, block_largest, out=largest)
    return largest


@max_logits.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[1], dtype=torch.float32)


def _documents(starts: Tensor, rows: int, seq_len: int) -> Tensor:
    """The document of each token, `[rows, seq_len]`."""
    tokens = torch.arange(rows * seq_len, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts, tokens, right=True).view(rows, seq_len)


class RecordMaxLogits(nn.Module):
    """Attention that records each head's largest score when it trains."""

    largest: Tensor

    def __init__(self, attend: Attend, heads: int, layout: RowLayout | None, device: torch.device):
        """
        Args:
            heads: query heads of this rank.
            layout: the layout of rows under context parallelism.
        """
        super().__init__()
        self.attend = attend
        self.layout = layout
        start = torch.full((heads,), -torch.inf, device=device)
        self.register_buffer("largest", start, persistent=False)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        if torch.is_grad_enabled():
            self._record(q.detach(), k.detach(), scores.scaled(q.shape[-1]))
        return self.attend(q, k, v, scores, sinks=sinks)

    def _record(self, q: Tensor, k: Tensor, scores: Scores) -> None:
        mask, window, scale, _ = scores
        assert scale is not None
        positions = None
        layout = self.layout
        if layout is not None:
            shards = funcol.all_gather_tensor(k.contiguous(), 0, layout.group_name)
            k = layout.join_shards(shards.chunk(layout.ranks), dim=2)
            positions = layout.positions(k.shape[2], q.device)
        starts = mask.starts if isinstance(mask, PackedDocuments) else None
        dense = mask if isinstance(mask, Tensor) else None
        if dense is not None and positions is not None and dense.shape[2] != q.shape[2]:
            dense = dense[:, :, positions]  # it has all queries' rows, as ranks exchange heads
        largest = max_logits(q, k, positions, mask=dense, starts=starts, window=window, scale=scale)
        # Not in place: the buffer is an input of a recomputed region, whose inputs may not change.
        self.largest = torch.maximum(self.largest, largest)
