"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules that predict the
tokens after the next one, during training only.

Module k = 1, 2, ... is one more block. From the hidden states of module k - 1 (for k = 1 the
model's, after the final norm) and the embeddings of the tokens k places ahead, it predicts the
tokens k + 1 places ahead, by the model's output projection:

    hidden_k = output_norm(block(eh_proj([enorm(embed(t_{i+k})), hnorm(hidden_{k-1})])))

The paper's equation 21 has the hidden state first; the published weights expect the embedding
first. Positions are token i's.

Beside the hidden states, the embeddings travel through the model as further slots of one tensor
`[b, s, (1 + n) dim]`. Module k turns slot k from embeddings into its hidden states. So each module
may be on any pipeline stage behind the final norm.

Shapes: b batch, s sequence, n modules.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.costs import Cost, products_of
from torchtitan.models.layers.linear import TokenLinear
from torchtitan.models.layers.norms import RMSNorm, build_norm


class MTPModule(nn.Module):
    """Norms and projection of a module besides its block; mixed into the block's class.

    The block's input is `[b, s, 2 dim]`: hidden states, then embeddings.
    """

    enorm: RMSNorm
    hnorm: RMSNorm
    eh_proj: TokenLinear
    output_norm: RMSNorm

    def __init__(self, args: Any, attend: Any):
        super().__init__(args, attend)
        self.enorm = build_norm(args.dim, args)
        self.hnorm = build_norm(args.dim, args)
        self.eh_proj = TokenLinear(2 * args.dim, args.dim)
        self.output_norm = build_norm(args.dim, args)

    def join(self, x: Tensor) -> Tensor:
        """The input of the block itself: `[b, s, 2 dim] -> [b, s, dim]`."""
        hidden, embeddings = x.chunk(2, dim=-1)
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))

    def cost(self, seq_len: int) -> Cost:
        """The block's, and embedding and hidden state: as they come, normalized, and joined."""
        joins = products_of(self, ("eh_proj",))
        block: Cost = super().cost(seq_len)
        return Cost(products=joins, saved=5 * joins[0].outputs) + block


class _MTPBlock(MTPModule):
    cost = MTPModule.cost

    def forward(self, x: Tensor, *shared: Any) -> Tensor:
        return self.output_norm(super().forward(self.join(x), *shared))


class _MTPMoEBlock(MTPModule):
    """A block with experts, whose forward calls both methods."""

    cost = MTPModule.cost

    def before_experts(self, x: Tensor, *shared: Any) -> Any:
        return super().before_experts(self.join(x), *shared)

    def after_experts(self, *inputs: Any) -> Tensor:
        return self.output_norm(super().after_experts(*inputs))


@cache
def mtp_module(block: Any) -> Any:
    """The class of modules whose block is of class `block`, built from the same arguments."""
    base = _MTPMoEBlock if hasattr(block, "before_experts") else _MTPBlock
    return type(f"MTP{block.__name__}", (base, block), {})


def embed_next(embed: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The embeddings of tokens and of the tokens after them, looked up together.

    Args:
        tokens: `[b, s, 1 + n]`.

    Returns:
        `[b, s, (1 + n) dim]`. Under tensor parallelism, s is this rank's part of the sequence.
    """
    embeddings = embed(tokens.movedim(2, 0).flatten(0, 1))
    return torch.cat(embeddings.chunk(tokens.shape[2]), dim=-1)
