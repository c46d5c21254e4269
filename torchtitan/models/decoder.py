"""A decoder-only transformer, dense or a mixture of experts, written for one device.

A pipeline stage is the model without some of its modules.

Shapes: b batch, s sequence, h query heads, k key-value heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchtitan.models.decoder_args import DecoderArgs
from torchtitan.models.layers import (
    Attend,
    FeedForward,
    Mask,
    RMSNorm,
    apply_rope,
    rope_cache,
    rope_frequencies,
    scale_frequencies,
)
from torchtitan.models.moe import Load, MoE, Routed


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with RoPE, on `[b, s, dim]`."""

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__()
        self.head_dim = args.head_dim
        self.attend = attend
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.q_norm = RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[b, s, h, d]`, keys and values `[b, s, k, d]` of `x`, before rotary positions.

        Under tensor parallelism they are this rank's heads.
        """
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None,
    ) -> Tensor:
        q, k, v = self.project(x)
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """The attention of a pre-norm transformer block."""

    attention_class: type[Attention] = Attention
    """Built from `(args, attend)`. Subclasses replace it."""

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = self.attention_class(args, attend)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)


class Block(_Block):
    """Pre-norm transformer block: `[b, s, dim] -> [b, s, dim]`."""

    feed_forward_class: type[nn.Module] = FeedForward
    """Built from `(dim, ffn_dim)`. Subclasses replace it."""

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__(args, attend)
        self.feed_forward = self.feed_forward_class(args.dim, args.ffn_dim)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class MoEBlock(_Block):
    """Pre-norm transformer block with experts: `[b, s, dim] -> [b, s, dim]`, and their load.

    Its forward has three parts: the middle one has shapes that depend on the data if the experts
    are on several ranks.
    """

    moe_class: type[MoE] = MoE
    """Built from `(args)`. Subclasses replace it."""

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__(args, attend)
        self.moe = self.moe_class(args)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None,
        token_weights: Tensor | None,
    ) -> tuple[Tensor, Load | None]:
        """
        Args:
            token_weights: `[b, s]`, weight of each token in the loss; None in inference.
        """
        x, routed = self.before_experts(x, cos, sin, mask, token_weights)
        rows = self.moe.experts(routed.rows, routed.ends)
        # Not both rows: checkpointing keeps the inputs of each part.
        out = self.after_experts(x, routed._replace(rows=rows))
        return out, routed.load

    def before_experts(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None,
        token_weights: Tensor | None,
    ) -> tuple[Tensor, Routed]:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x, self.moe.dispatch(self.ffn_norm(x), token_weights)

    def after_experts(self, x: Tensor, routed: Routed) -> Tensor:
        return x + self.moe.combine(routed.rows, routed, like=x)


class TiedOutput(nn.Module):
    """Projection by the token embedding: `[b, s, dim], [vocab, dim] -> [b, s, vocab]`."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding)


class Decoder(nn.Module):
    """`forward(tokens [b, s]) -> logits [b, s, vocab]`.

    Without the embedding the input, and without the output projection the result, is hidden states
    `[b, s, dim]`.
    """

    block_class: type[nn.Module] = Block
    """The blocks without experts. Built from `(args, attend)`. Subclasses replace it."""
    moe_block_class: type[MoEBlock] = MoEBlock
    """The blocks with experts, likewise."""
    cos: Tensor
    sin: Tensor

    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__()
        self.args = args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # A dictionary, because a layer keeps its index on every pipeline stage.
        self.layers = nn.ModuleDict()
        for i in range(args.n_layers):
            kind = self.moe_block_class if args.has_experts(i) else self.block_class
            self.layers[str(i)] = kind(args, attend)
        self.norm: RMSNorm | None = RMSNorm(args.dim, eps=args.norm_eps)
        self.output: nn.Linear | TiedOutput | None = TiedOutput()
        if not args.tie_embeddings:
            self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the RoPE tables, and reset loads. Called again when a meta model gets memory."""
        args = self.args
        scaling = args.rope_scaling
        freqs = rope_frequencies(args.head_dim, args.rope_theta)
        if scaling is not None:
            freqs = scale_frequencies(
                freqs,
                scaling.factor,
                scaling.low_freq_factor,
                scaling.high_freq_factor,
                scaling.original_max_seq_len,
            )
        cos, sin = rope_cache(freqs, args.max_seq_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for layer in self.layers.values():
            if isinstance(layer, MoEBlock):
                layer.moe.router.init_buffers()

    @property
    def output_weight(self) -> Tensor:
        """The output projection's weight, `[vocab, dim]`."""
        owner = self.tok_embeddings if isinstance(self.output, TiedOutput) else self.output
        assert owner is not None
        return owner.weight

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits `[b, s, vocab]` of final hidden states `[b, s, dim]`, projected by `weight`.

        All logits come from here: in `forward`, a chunked loss and generation.
        """
        assert self.output is not None
        if isinstance(self.output, TiedOutput):
            return self.output(x, weight)
        return functional_call(self.output, {"weight": weight}, (x,))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        token_weights: Tensor | None = None,
        *,
        project: bool = True,
    ) -> Tensor:
        """
        Args:
            positions: position of each token in its row, `[s]` or `[b, s]`. Default: 0, 1, 2, ...
            mask: what each token attends to, from `document_mask`. Default: everything before it.
            token_weights: `[b, s]`, the weight of each token in the loss, by which experts balance
                their load; 0 doesn't count. Default: inference.
            project: False returns the final hidden states `[b, s, dim]`, to be projected in slices.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos = self.cos[positions]
        sin = self.sin[positions]
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            if isinstance(layer, MoEBlock):
                x, load = layer(x, cos, sin, mask, token_weights)
                if load is not None:
                    layer.moe.router.record(load)
            else:
                x = layer(x, cos, sin, mask)
        x = self.norm(x) if self.norm is not None else x
        if not project or self.output is None:
            return x
        return self.project(x, self.output_weight)
