"""Llama 3, written for one device. Its ends may be absent, so that a part of it is a pipeline stage.

Shapes: b batch, s sequence, h query heads, k key-value heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchtitan.models.layers import (
    Attend,
    FeedForward,
    Mask,
    apply_rope,
    document_mask,
    rope_cache,
    rope_frequencies,
    scale_frequencies,
)
from torchtitan.models.llama3.args import LlamaArgs


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions; keeps `[b, s, dim]`."""

    def __init__(self, args: LlamaArgs, attend: Attend):
        super().__init__()
        self.head_dim = args.head_dim
        self.attend = attend
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        # Head counts are read off the projections' outputs, which hold fewer heads under tensor parallelism.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block: `[b, s, dim] -> [b, s, dim]`."""

    def __init__(self, args: LlamaArgs, attend: Attend):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, attend)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class TiedOutput(nn.Module):
    """Output projection by the token embedding: `[b, s, dim], [vocab, dim] -> [b, s, vocab]`. Has no weight itself."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding)


class Llama(nn.Module):
    """`forward(tokens [b, s]) -> logits [b, s, vocab]`; a part without its ends takes or gives `[b, s, dim]`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, args: LlamaArgs, attend: Attend):
        super().__init__()
        self.args = args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # Keyed by index, not listed: a layer keeps its name in every part of the model.
        self.layers = nn.ModuleDict({str(i): Block(args, attend) for i in range(args.n_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output: nn.Linear | TiedOutput | None = (
            TiedOutput() if args.tie_embeddings else nn.Linear(args.dim, args.vocab_size, bias=False)
        )
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the RoPE tables. Called again once a model built on the meta device has real memory."""
        args, freqs = self.args, rope_frequencies(self.args.head_dim, self.args.rope_theta)
        if scaling := args.rope_scaling:
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

    @property
    def output_weight(self) -> Tensor:
        """Of the output projection, `[vocab, dim]`."""
        owner = self.tok_embeddings if isinstance(self.output, TiedOutput) else self.output
        assert owner is not None
        return owner.weight

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits `[b, s, vocab]` of final hidden states `[b, s, dim]`, by `output_weight` or another in its place."""
        assert self.output is not None
        if isinstance(self.output, TiedOutput):
            return self.output(x, weight)
        return functional_call(self.output, {"weight": weight}, (x,))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        *,
        project: bool = True,
    ) -> Tensor:
        """
        Args:
            positions: `[s]`, the place of each token in its row, where rows are not given whole and in order. Without
                documents also `[b, s]`, where rows differ.
            documents: `[b, whole row]`, the document of each token, within which attention stays; None: no such limit.
            project: False gives the final hidden states `[b, s, dim]`, to be projected a slice at a time.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = self.cos[positions], self.sin[positions]
        mask = None if documents is None else document_mask(documents, positions)
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            x = layer(x, cos, sin, mask)
        x = self.norm(x) if self.norm is not None else x
        if not project or self.output is None:
            return x
        return self.output(x, self.output_weight) if isinstance(self.output, TiedOutput) else self.output(x)
