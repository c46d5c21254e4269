"""Windows under context parallelism: each rank gets the keys that its queries see, and no others.

A window reaches `window - 1` keys back from the start of a chunk. Those that lie on other
ranks are fetched by one all-to-all, in which a pair of ranks exchanges only the keys it needs; no
step visits a rank in vain, and the bytes don't grow with the row. The keys before a chunk and the
chunk's own are consecutive, so attention works as on one device, from an offset.

Shapes: b batch, h query heads, k key-value heads, s positions on this rank, d width of queries and
keys, e width of values.
"""

import math

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from torchtitan.models.attention.dense import attend_variant
from torchtitan.models.attention.interface import Scores
from torchtitan.parallel.context.layout import RowLayout


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None, layout: RowLayout
) -> Tensor:
    """Local queries' attention: q `[b, h, s, d]`, k `[b, k, s, d]`, v `[b, k, s, e]` ->
    `[b, h, s, e]`.

    Args:
        scores: with a window; the mask is None or a tensor `[b, 1, s, ranks * s]`.
        sinks: as for `Attend`.
    """
    mask, window, scale, _ = scores
    assert window is not None
    length = q.shape[2] // len(layout.chunks(0))
    keys, values = (_chunks(x, length, layout) for x in (k, v))
    _receive(keys, values, k, v, layout=layout, window=window)
    outputs = []
    for index, chunk in enumerate(layout.chunks(layout.rank)):
        begin = max(0, chunk * length - (window - 1))
        end = (chunk + 1) * length
        rows = slice(index * length, (index + 1) * length)
        chunk_mask = None if mask is None else mask[:, :, rows, begin:end]
        outputs.append(
            attend_variant(
                q[:, :, rows],
                _between(keys, begin, end, length),
                _between(values, begin, end, length),
                Scores(chunk_mask, window, scale, offset=chunk * length - begin),
                sinks=sinks,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def tails(layout: RowLayout, source: int, to: int, length: int, window: int) -> dict[int, int]:
    """The keys of rank `source` that rank `to` needs: for each chunk the number of last keys."""
    counts = {}
    for chunk in layout.chunks(source):
        later = [local_chunk for local_chunk in layout.chunks(to) if local_chunk > chunk]
        if source == to or not later:
            continue
        unseen = (min(later) - chunk) * length - (window - 1)
        if unseen < length:
            counts[chunk] = length - max(0, unseen)
    return counts


def _chunks(x: Tensor, length: int, layout: RowLayout) -> dict[int, Tensor]:
    """This rank's chunks, by number."""
    return dict(zip(layout.chunks(layout.rank), x.split(length, dim=2), strict=True))


def _between(chunks: dict[int, Tensor], begin: int, end: int, length: int) -> Tensor:
    """Positions `begin` to `end` of the row, from `chunks`, some of which have only their end."""
    pieces = []
    for chunk in range(begin // length, math.ceil(end / length)):
        count = (chunk + 1) * length - max(begin, chunk * length)
        pieces.append(chunks[chunk][:, :, -count:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _receive(
    keys: dict[int, Tensor],
    values: dict[int, Tensor],
    k: Tensor,
    v: Tensor,
    layout: RowLayout,
    window: int,
) -> None:
    """Add the ends of other ranks' chunks that this rank needs to `keys` and `values`.

    All ranks take part in both directions, also one that only sends or only receives.
    """
    length = next(iter(keys.values())).shape[2]
    ranks = range(layout.ranks)
    me = layout.rank
    if not any(tails(layout, a, b, length, window=window) for a in ranks for b in ranks):
        return
    send_counts = [tails(layout, me, rank, length, window=window) for rank in ranks]
    receive_counts = [tails(layout, rank, me, length, window=window) for rank in ranks]
    slices = [
        x[chunk][:, :, -count:].flatten()
        for counts in send_counts
        for chunk, count in counts.items()
        for x in (keys, values)
    ]
    per_key = [x[:, :, 0].numel() for x in (k, v)]
    buffer = all_to_all_single_autograd(
        torch.cat([k[:, :, :0].flatten(), *slices]),
        [sum(counts.values()) * sum(per_key) for counts in receive_counts],
        [sum(counts.values()) * sum(per_key) for counts in send_counts],
        layout.group_name,
    )
    pieces = [(chunk, count) for counts in receive_counts for chunk, count in counts.items()]
    sizes = [count * size for _, count in pieces for size in per_key]
    flat = iter(buffer.split(sizes))
    for chunk, count in pieces:
        for like, x in ((k, keys), (v, values)):
            x[chunk] = next(flat).view(*like.shape[:2], count, like.shape[3])
    if not pieces:  # join the graph with no keys
        (local_chunk,) = keys
        nothing = buffer.view(*k.shape[:2], 0, k.shape[3])
        keys[local_chunk] = torch.cat([nothing, keys[local_chunk]], dim=2)
