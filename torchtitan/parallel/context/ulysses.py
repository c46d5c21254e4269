"""Context parallelism by heads (DeepSpeed Ulysses, Jacobs et al., arXiv:2309.14509).

An all-to-all gives each rank whole rows of some heads, so attention of any kind works as on one
device; another returns the result to the ranks that hold the tokens.

Shapes: b batch, h query heads, k key-value heads, s positions on this rank, d width of queries and
keys, e width of values, n ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from torchtitan.models.attention.interface import CAUSAL, Attend, Scores
from torchtitan.parallel.context.layout import RowLayout


def ulysses_attention_backend(attend: Attend, layout: RowLayout) -> Attend:
    """Attention over a row that ranks share according to `layout`.

    Args:
        attend: attention on one device, with masks for whole rows.
    """

    def attend_some_heads(
        q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        copies = copies_of_keys(q.shape[1], k.shape[1], layout.ranks)
        if copies > 1:
            k = k.repeat_interleave(copies, 1)
            v = v.repeat_interleave(copies, 1)
        local_sinks = None if sinks is None else sinks.chunk(layout.ranks)[layout.rank]
        q, k, v = to_heads((q, k, v), layout)
        return to_sequence(attend(q, k, v, scores, sinks=local_sinks), layout)

    return attend_some_heads


def copies_of_keys(heads: int, kv_heads: int, ranks: int) -> int:
    """Number of ranks that each key head is sent to, so that every rank has its queries' keys.

    Raises:
        ValueError: the heads can't be split evenly over the ranks.
    """
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f"{heads} query and {kv_heads} key heads can't be split over {ranks} ranks"
        )
    return max(1, ranks // kv_heads)


def to_heads(tensors: Sequence[Tensor], layout: RowLayout) -> list[Tensor]:
    """Exchange parts of rows with all heads for whole rows with some heads, in one all-to-all: each
    `[b, h, s, d]` becomes `[b, h / n, n s, d]`.
    """
    n = layout.ranks
    shapes = []
    buffers = []
    for x in tensors:
        b, h, s, d = x.shape
        shapes.append((n, b, h // n, s, d))
        buffers.append(x.unflatten(1, (n, h // n)).movedim(1, 0).reshape(n, -1))
    sizes = [buffer.shape[1] for buffer in buffers]
    shards = _exchange(torch.cat(buffers, dim=1), layout).split(sizes, dim=1)
    return [
        layout.join_shards(x.reshape(shape).unbind(0), dim=2)
        for x, shape in zip(shards, shapes, strict=True)
    ]


def to_sequence(x: Tensor, layout: RowLayout) -> Tensor:
    """The reverse of `to_heads` for one tensor: `[b, h / n, n s, e] -> [b, h, s, e]`."""
    shards = torch.stack(layout.split_rows(x, dim=2))
    heads = _exchange(shards.flatten(1), layout)
    return heads.view(shards.shape).movedim(0, 1).flatten(1, 2)


def _exchange(buffer: Tensor, layout: RowLayout) -> Tensor:
    """Send row i of `buffer` to rank i; row i of the result comes from rank i."""
    rows = all_to_all_single_autograd(buffer.flatten(), None, None, layout.group_name)
    return rows.view(buffer.shape)
