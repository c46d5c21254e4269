"""Attention of a decoder, ordinary and latent, on `[b, s, dim]`.

Shapes: b batch, s sequence, h query heads, k key-value heads, d head size, r rotated features.
"""

import torch
from torch import Tensor, nn

from torchtitan.models.args import DecoderArgs, mean_span
from torchtitan.models.attention.interface import Attend, Mask, Scores
from torchtitan.models.costs import FP32, Cost, Heads, products_of
from torchtitan.models.layers.linear import PerHead, TokenLinear
from torchtitan.models.layers.norms import build_norm
from torchtitan.models.layers.rope import apply_rope


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with RoPE, on `[b, s, dim]`."""

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__()
        queries = args.n_heads * args.head_dim
        keys = args.n_kv_heads * args.head_dim
        self.head_dim = args.head_dim
        self.attend = attend
        self.scores = layer_scores(args)
        self.interleaved = args.rope_interleaved
        self.wq = nn.Linear(args.dim, queries, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wg = nn.Linear(args.dim, queries, bias=False) if args.gated_attention else None
        self.wo = nn.Linear(queries, args.dim, bias=args.wo_bias)
        self.q_norm = self.k_norm = self.wq_norm = self.wk_norm = None
        if args.qk_norm and args.qk_norm_whole:
            self.wq_norm = build_norm(queries, args)
            self.wk_norm = build_norm(keys, args)
        elif args.qk_norm:
            self.q_norm = build_norm(args.head_dim, args)
            self.k_norm = build_norm(args.head_dim, args)
        self.sinks = PerHead(args.n_heads) if args.sinks else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[b, s, h, d]`, keys and values `[b, s, k, d]` of `x`, before rotary positions.

        Under tensor parallelism they are this rank's heads.
        """
        q = self.wq(x)
        k = self.wk(x)
        if self.wq_norm is not None and self.wk_norm is not None:
            q = self.wq_norm(q)
            k = self.wk_norm(k)
        q = q.unflatten(-1, (-1, self.head_dim))
        k = k.unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Mask | None
    ) -> Tensor:
        """
        Args:
            cos, sin: `[s, r]` or `[b, s, r]`; None: no positions.
        """
        q, k, v = self.project(x)
        if cos is not None and sin is not None:
            q = apply_rope(q, cos, sin, interleaved=self.interleaved)
            k = apply_rope(k, cos, sin, interleaved=self.interleaved)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        sinks = None if self.sinks is None else self.sinks()
        out = self.attend(q, k, v, self.scores.masked(mask), sinks=sinks)
        out = out.transpose(1, 2).flatten(2)
        if self.wg is not None:
            out = out * self.wg(x).sigmoid()
        return self.wo(out)

    def cost(self, seq_len: int) -> Cost:
        """Rotations read and write queries and keys; attention reads and writes all heads. The
        backward needs the input, queries, keys, values and the output; with gates also these and
        their products; and the inputs of norms of heads.
        """
        queries = self.wq.out_features
        keys = self.wk.out_features
        counts = queries // self.head_dim, keys // self.head_dim
        gates = 0 if self.wg is None else 2 * queries
        is_normed = self.q_norm is not None or self.wq_norm is not None
        norms = queries + keys if is_normed else 0
        heads = score_heads(self.scores, counts, (self.head_dim, self.head_dim), seq_len)
        return Cost(
            products=products_of(self, ("wq", "wk", "wv", "wg", "wo")),
            gathered=(self.wq.in_features,),
            moved=4 * (queries + keys) + 2 * gates,
            saved=self.wq.in_features + 2 * (queries + keys) + gates + norms,
            saved_bytes=FP32 * (heads.log_sums + (sum(counts) if is_normed else 0)),
            heads=heads,
        )


def score_heads(
    scores: Scores, counts: tuple[int, int], sizes: tuple[int, int], seq_len: int
) -> Heads:
    """Heads that mix tokens by scores, of which the unmasked half counts.

    The backward computes scores again, gradients of queries and keys, and of values and weights
    (Dao, arXiv:2307.08691).

    Args:
        counts: number of query heads, and of heads of keys and values.
        sizes: width of a head's queries and keys, and of its values.
    """
    heads, kv_heads = counts
    size, value_size = sizes
    return Heads(
        queries=heads * size,
        keys=kv_heads * size,
        values=kv_heads * value_size,
        out=heads * value_size,
        flops=mean_span(seq_len, scores.window) * heads * (size + value_size),
        backward=(3 * size + 2 * value_size) / (size + value_size),
        kv_heads=kv_heads,
        log_sums=heads,
        window=scores.window is not None and scores.window < seq_len,
    )


def layer_scores(args: DecoderArgs) -> Scores:
    """A layer's window, and the scale of its scores if it isn't the default.

    Args:
        args: the layer's, from `DecoderArgs.layer_args`.
    """
    window = args.window if args.layer_pattern[0] == "window" else None
    scale = None if args.score_scale == args.head_dim**-0.5 else args.score_scale
    return Scores(window=window, scale=scale)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), on `[b, s, dim]`.

    Keys and values of all heads are computed from one narrow vector per token. Positions are in r
    separate features, whose keys all heads share.
    """

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__()
        heads = args.n_heads
        rank = args.kv_lora_rank
        rope = args.rope_head_size
        eps = args.latent_norm_eps
        queries = heads * args.head_dim
        self.head_dim = args.head_dim
        self.widths = (args.head_dim - rope, rope)
        self.value_dim = args.value_dim
        self.rank = rank
        self.attend = attend
        self.scores = layer_scores(args)
        self.interleaved = args.rope_interleaved
        self.wq = self.wq_a = self.q_norm = self.wq_b = None
        if args.q_lora_rank:
            self.wq_a = TokenLinear(args.dim, args.q_lora_rank)
            self.q_norm = build_norm(args.q_lora_rank, args, eps)
            self.wq_b = nn.Linear(args.q_lora_rank, queries, bias=False)
        else:
            self.wq = nn.Linear(args.dim, queries, bias=False)
        self.wkv_a = TokenLinear(args.dim, rank + rope)
        self.kv_norm = build_norm(rank, args, eps)
        self.latent = nn.Identity()
        """Marks where tensor parallelism gathers the sequence: here it is narrowest."""
        self.wkv_b = nn.Linear(rank, heads * (self.widths[0] + args.value_dim), bias=False)
        self.shared_key = nn.Identity()
        """Marks the rotated keys, which the heads of all ranks share."""
        self.wo = nn.Linear(heads * args.value_dim, args.dim, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        """`[b, s, h, d]`, before rotary positions."""
        if self.wq is not None:
            q = self.wq(x)
        else:
            assert self.wq_a is not None
            assert self.q_norm is not None
            assert self.wq_b is not None
            q = self.wq_b(self.q_norm(self.wq_a(x)))
        return q.unflatten(-1, (-1, self.head_dim))

    def latents(self, x: Tensor) -> Tensor:
        """The normalized latent vectors and the shared keys, before rotary positions: `[b, s, rank
        + r]`.
        """
        compressed, key = self.wkv_a(x).split((self.rank, self.widths[1]), dim=-1)
        return self.latent(torch.cat([self.kv_norm(compressed), key], dim=-1))

    def expand(self, compressed: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[b, s, h, d]` and values `[b, s, h, value_dim]`.

        Args:
            compressed: latent vectors `[b, s, rank]`.
            key: `[b, s, 1, r]`, rotated.
        """
        expanded = self.wkv_b(compressed).unflatten(-1, (-1, self.widths[0] + self.value_dim))
        k, v = expanded.split((self.widths[0], self.value_dim), dim=-1)
        return torch.cat([k, key.expand(-1, -1, k.shape[2], -1)], dim=-1), v

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Mask | None
    ) -> Tensor:
        """
        Args:
            cos, sin: `[s, r]` or `[b, s, r]`; None: no positions.
        """
        q = self.queries(x)
        latents = self.latents(x)
        key = self.shared_key(latents[..., self.rank :]).unsqueeze(2)
        if cos is not None and sin is not None:
            plain, rotated = q.split(self.widths, dim=-1)
            rotated = apply_rope(rotated, cos, sin, interleaved=self.interleaved)
            q = torch.cat([plain, rotated], dim=-1)
            key = apply_rope(key, cos, sin, interleaved=self.interleaved)
        out = self.attend_latents(q, latents[..., : self.rank], key, mask)
        return self.wo(out.flatten(2))

    def cost(self, seq_len: int) -> Cost:
        """The backward needs the input, the narrow vectors before and after their norms, queries,
        keys and values of all heads, and the output. Tensor parallelism gathers what queries and
        keys are computed from, where it is narrow.
        """
        count = self.wo.in_features // self.value_dim
        dim = self.wkv_a.weight.shape[1]
        narrow = self.rank + self.widths[1]
        query_rank = 0 if self.wq_b is None else self.wq_b.in_features
        sizes = (self.head_dim, self.value_dim)
        heads = score_heads(self.scores, (count, count), sizes, seq_len)
        extra = dim + narrow + 2 * query_rank + self.rank
        return Cost(
            products=products_of(self, ("wq", "wq_a", "wq_b", "wkv_a", "wkv_b", "wo")),
            gathered=(query_rank or dim, narrow),
            moved=4 * heads.queries + 2 * (heads.keys + heads.values + extra),
            saved=2 * heads.queries + 2 * heads.values + extra + narrow + query_rank,
            saved_bytes=FP32 * heads.log_sums,
            launches=(8, 17, 6, 12),
            heads=heads,
        )

    def attend_latents(
        self, q: Tensor, compressed: Tensor, key: Tensor, mask: Mask | None
    ) -> Tensor:
        """Attention's outputs `[b, s, h, value_dim]`. Replaced in generation.

        Args:
            q: `[b, s, h, d]`, rotated.
            compressed, key: as for `expand`.
        """
        k, v = self.expand(compressed, key)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.attend(q, k, v, self.scores.masked(mask)).transpose(1, 2)
