"""Caches of earlier tokens in generation: keys and values, latent vectors, states.

The model is unchanged: layers call `self.attend`, `self.attend_latents` or `self.mix`, which are
replaced by objects with memory. Rows are padded at the end, where causal attention doesn't look,
so each row has the positions it would have alone. An ordinary cache keeps a padding token until the
row reaches its position and overwrites it; the other caches don't keep padding at all.

Shapes: b rows, s new tokens of each, h query heads, k key-value heads, d width of queries and keys,
e width of values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.models.attention.dense import attend_variant
from torchtitan.models.attention.interface import CAUSAL, Attend, Scores
from torchtitan.models.attention.modules import LatentAttention
from torchtitan.models.delta.layer import DeltaWeights, GatedDeltaNet, convolve, gates
from torchtitan.models.delta.rule import chunked_delta_rule, normalize, recurrent_delta_rule


class GenerationCache:
    """The positions of one forward's tokens, for all layers, each of which has its own cache."""

    def __init__(self, model: Any, rows: int, length: int):
        """
        Args:
            rows: largest number of rows.
            length: positions of the longest row, padding included.
        """
        self.rows = rows
        self.length = length
        self.layers: list[CachedLayer] = []
        for module in model.modules():
            attend = getattr(module, "attend", None)
            if isinstance(module, GatedDeltaNet):
                module.mix = self._add(CachedState(self))
            elif isinstance(module, LatentAttention):
                latents = self._add(CachedLatents(self, module))
                module.attend_latents = latents  # type: ignore[method-assign]
            elif attend is not None:
                plain = attend.plain if isinstance(attend, CachedAttention) else attend
                module.attend = self._add(CachedAttention(self, plain))

    def _add(self, layer: Any) -> Any:
        self.layers.append(layer)
        return layer

    @property
    def bytes(self) -> int:
        """Memory that the layers hold on this rank, once they have computed a token."""
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer.buffers)

    def advance(self, positions: Tensor, counts: Sequence[int], device: torch.device) -> None:
        """Move on to the tokens of the next forward.

        Args:
            positions: the new tokens' positions, `[b, s]` on the host, consecutive in each row.
                All rows begin at 0, or none does.
            counts: tokens of each row without padding; 1 in all rows that don't begin at 0.
            device: where the model computes.
        """
        self.span = int(positions.max()) + 1
        self.new = max(counts)
        self.positions = positions.to(device)
        self.counts = torch.tensor(counts, device=device)
        self.ends = self.positions[:, 0] + self.counts
        self.empty = self.span == positions.shape[1]
        assert self.empty or self.new == 1, "a row continues by one token at a time"
        self._slots: dict[int, _Slots] = {}

    def slots(self, window: int | None) -> "_Slots":
        """The slots in which layers with this window keep tokens; computed once for all of them."""
        size = self.length if window is None else min(window, self.length)
        if size not in self._slots:
            self._slots[size] = _Slots(self, size)
        return self._slots[size]


class _Slots:
    """Places for the last `size` tokens of each row: position p is in slot `p % size`."""

    def __init__(self, cache: GenerationCache, size: int):
        self.cache = cache
        self.size = size
        self.all = size == cache.length
        device = cache.positions.device
        slots = torch.arange(cache.span if self.all else size, device=device)
        # A padding token, whose result is ignored, sees the same slots as the row's last token.
        queries = torch.minimum(cache.positions, cache.ends[:, None] - 1)[:, :, None]
        if self.all:
            self.visible = (queries >= slots)[:, None]
            return
        ends = cache.ends[:, None]
        self.positions = ends - 1 - (ends - 1 - slots) % size
        """`[b, size]`, the position in each slot after this forward; negative: none."""
        positions = self.positions[:, None]
        self.visible = ((positions >= 0) & (positions <= queries) & (positions > queries - size))[
            :, None
        ]

    def keep(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write `new` `[b, k, s, d]` to `buffer` `[rows, k, size, d]`.

        Returns:
            The part that queries may see, a view of `buffer`.
        """
        cache = self.cache
        buffer = buffer[: len(new)]
        if self.all:
            buffer.scatter_(2, cache.positions[:, None, :, None].expand_as(new), new)
            return buffer[:, :, : cache.span]
        if cache.empty:
            index = self.positions.clamp(min=0)[:, None, :, None]
            return buffer.copy_(new.gather(2, index.expand_as(buffer)))
        new = new[:, :, :1]
        index = (cache.positions[:, :1] % self.size)[:, None, :, None]
        return buffer.scatter_(2, index.expand_as(new), new)


class CachedLayer:
    """A layer's memory of earlier tokens."""

    def __init__(self, cache: GenerationCache):
        self.cache = cache
        self.buffers: list[Tensor] = []


class CachedAttention(CachedLayer):
    """Attention to the new tokens and earlier ones, whose keys and values are kept."""

    def __init__(self, cache: GenerationCache, plain: Attend):
        super().__init__(cache)
        self.plain = plain

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        mask, window, scale, _ = scores
        assert mask is None, "generation has no document masks"
        slots = self.cache.slots(window)
        if not self.buffers:
            # allocated here, as tensor parallelism leaves a rank only some of the heads
            self.buffers = [_empty(self.cache, x, slots.size) for x in (k, v)]
        keys, values = (slots.keep(*pair) for pair in zip(self.buffers, (k, v), strict=True))
        if self.cache.empty:
            return self.plain(q, k, v, scores, sinks)
        return _attend(q, keys, values, Scores(slots.visible, scale=scale), sinks=sinks)


class CachedLatents(CachedLayer):
    """Latent attention to new and earlier tokens. The cache holds only the latent vectors and the
    shared, rotated keys.

    Keys and values aren't expanded from them. Instead, queries are projected to the latent space,
    and attention's outputs from there (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): all heads
    share the latent vectors as keys and values.
    """

    def __init__(self, cache: GenerationCache, layer: LatentAttention):
        super().__init__(cache)
        self.layer = layer

    def __call__(self, q: Tensor, compressed: Tensor, key: Tensor, mask: Any = None) -> Tensor:
        """
        Args:
            q: `[b, s, h, d]`, rotated.
            compressed: latent vectors `[b, s, rank]`; a DTensor under tensor parallelism.
            key: `[b, s, 1, r]`, rotated.

        Returns:
            `[b, s, h, e]`.
        """
        assert mask is None, "generation has no document masks"
        layer = self.layer
        _, window, scale, _ = layer.scores.scaled(layer.head_dim)
        slots = self.cache.slots(window)
        local_latents = _local(compressed)
        new = torch.cat([local_latents, key.squeeze(2)], -1).unsqueeze(1)
        if not self.buffers:
            self.buffers = [_empty(self.cache, new, slots.size)]
        latents = slots.keep(self.buffers[0], new)
        if self.cache.empty:
            return LatentAttention.attend_latents(layer, q, compressed, key, None)
        plain_q, rotary_q = q.split(layer.widths, -1)
        weight = _local(layer.wkv_b.weight).unflatten(0, (q.shape[2], -1))
        key_weight, value_weight = weight.split([layer.widths[0], layer.value_dim], 1)
        latent_q = torch.cat([torch.einsum("bshd,hdr->bshr", plain_q, key_weight), rotary_q], -1)
        out = _attend(
            latent_q.transpose(1, 2),
            latents,
            latents[..., : layer.rank],
            Scores(slots.visible, scale=scale),
        )
        return torch.einsum("bhsr,her->bshe", out, value_weight)


class CachedState(CachedLayer):
    """Gated DeltaNet from the state after the last token, and the last inputs of its convolution:
    the same size for any number of tokens.
    """

    def __call__(
        self, qkv: Tensor, ba: Tensor, weights: DeltaWeights, documents: Tensor | None
    ) -> Tensor:
        """`Mix` of the new tokens."""
        assert documents is None, "generation has no document masks"
        cache = self.cache
        rows, length = qkv.shape[:2]
        history = weights.q_conv.shape[-1] - 1
        state, inputs = (x[:rows] for x in self._buffers(qkv, weights, history))
        qkv = torch.cat([inputs, qkv[:, : cache.new]], 1)
        q, k, v = (x[:, history:] for x in convolve(qkv, weights, None))
        g, beta = gates(ba[:, : cache.new], weights)
        counts = cache.counts[:, None]
        padding = torch.arange(cache.new, device=counts.device) >= counts
        # A token with g = beta = 0 leaves the state as it is.
        g, beta = (x.masked_fill(padding[..., None], 0) for x in (g, beta))
        rule = recurrent_delta_rule if cache.new == 1 else chunked_delta_rule
        q = normalize(q) * q.shape[-1] ** -0.5
        out, after = rule(q, normalize(k), v, g, beta, state)
        state.copy_(after)
        last = (counts + torch.arange(history, device=counts.device))[..., None, None]
        inputs.copy_(qkv.gather(1, last.expand_as(inputs)))
        return F.pad(out.to(v.dtype), (0, 0, 0, 0, 0, length - cache.new))

    def _buffers(self, qkv: Tensor, weights: DeltaWeights, history: int) -> list[Tensor]:
        """The states `[rows, h, d, e]` in fp32, and earlier inputs `[rows, before, k, w]`."""
        if not self.buffers:
            heads, group = weights.A_log.shape
            size = weights.q_conv.shape[1]
            values = weights.v_conv.shape[1] // group
            shape = (self.cache.rows, heads * group, size, values)
            state = qkv.new_zeros(shape, dtype=torch.float32)
            self.buffers = [state, qkv.new_zeros(self.cache.rows, history, *qkv.shape[2:])]
        elif self.cache.empty:
            for x in self.buffers:
                x.zero_()
        return self.buffers


def _empty(cache: GenerationCache, like: Tensor, size: int) -> Tensor:
    """`[rows, k, size, d]` for `like` `[b, k, s, d]`."""
    return like.new_zeros(cache.rows, like.shape[1], size, like.shape[3])


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Attention to the cached keys that `scores.mask` `[b, 1, s, S]` lets queries see."""
    if sinks is not None:
        # Behind all keys, so that the mask alone decides which keys a query sees.
        return attend_variant(q, keys, values, scores.at_offset(keys.shape[2]), sinks=sinks)
    is_grouped = q.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=scores.mask, scale=scores.scale, enable_gqa=is_grouped
    )


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
