"""Gated DeltaNet (Yang et al., arXiv:2412.06464), as in Qwen3-Next: linear attention by the gated
delta rule.

A token's queries, keys and values pass a short convolution; the state that they read and write has
one size at any length of the sequence.

Shapes: b batch, s sequence, k key heads, h value heads, d size of keys, e size of values. A key
head serves h / k consecutive value heads, its group.
"""

from functools import partial
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention.interface import DocumentMask
from torchtitan.models.costs import Cost, Heads, products_of
from torchtitan.models.delta.args import rule_flops
from torchtitan.models.delta.fla import fla_delta_rule
from torchtitan.models.delta.rule import causal_convolution, chunked_delta_rule, normalize
from torchtitan.models.layers.linear import PerHead
from torchtitan.models.layers.norms import RMSNorm
from torchtitan.utils.torch_compat import softplus


class DeltaWeights(NamedTuple):
    """The weights that mixing tokens needs, for some key heads."""

    q_conv: Tensor
    """`[k, d, taps]`."""
    k_conv: Tensor
    """`[k, d, taps]`."""
    v_conv: Tensor
    """`[k, group * e, taps]`."""
    A_log: Tensor
    """`[k, group]`."""
    dt_bias: Tensor
    """`[k, group]`."""


class Mix(Protocol):
    """Mixes tokens: qkv `[b, s, k, 2d + group * e]`, ba `[b, s, k, 2 group]` -> `[b, s, h, e]`.

    Heads don't depend on each other, but each needs all tokens of its row.
    """

    def __call__(
        self, qkv: Tensor, ba: Tensor, weights: DeltaWeights, documents: Tensor | None
    ) -> Tensor: ...


def convolve(
    qkv: Tensor, weights: DeltaWeights, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys `[b, s, k, d]`, and values `[b, s, h, e]`, each of the last few tokens."""
    size = weights.q_conv.shape[1]
    projections = qkv.split([size, size, weights.v_conv.shape[1]], -1)
    q, k, v = (
        F.silu(causal_convolution(x, weight, documents))
        for x, weight in zip(projections, weights[:3], strict=True)
    )
    return q, k, v.unflatten(-1, (weights.A_log.shape[1], -1)).flatten(2, 3)


def gates(ba: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay in fp32, and beta: how much of a correction is stored. `[b, s, h]`."""
    b, a = ba.chunk(2, -1)
    step = softplus(a.float() + weights.dt_bias.float())
    return (-weights.A_log.float().exp() * step).flatten(2), b.sigmoid().flatten(2)


class Rule(Protocol):
    """The gated delta rule: q and k `[b, s, k, d]` before they are normalized, v `[b, s, h, e]`,
    g and beta `[b, s, h]`, documents `[b, s]` -> `[b, s, h, e]`.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None
    ) -> Tensor: ...


def torch_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None
) -> Tensor:
    """The `Rule` in plain PyTorch, in chunks."""
    q = normalize(q) * q.shape[-1] ** -0.5
    return chunked_delta_rule(q, normalize(k), v, g, beta=beta, documents=documents)[0]


def mix_rows(
    qkv: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    documents: Tensor | None,
    rule: Rule = torch_delta_rule,
) -> Tensor:
    """`Mix` for whole rows."""
    q, k, v = convolve(qkv, weights, documents)
    g, beta = gates(ba, weights)
    return rule(q, k, v, g, beta=beta, documents=documents)


def use_fla(model: nn.Module) -> None:
    """Let flash-linear-attention compute the rule in all layers of `model`."""
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.mix = partial(mix_rows, rule=fla_delta_rule)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet on `[b, s, dim]`.

    The projections are packed by key head, so that tensor parallelism gives a rank whole heads: the
    rows of a head are `[q | k | its v | its z]` in `in_proj_qkvz`, `[its b | its a]` in
    `in_proj_ba`.
    """

    reads_documents = True
    """It needs a `DocumentMask`, not only attention's mask."""

    def __init__(self, args: DecoderArgs):
        super().__init__()
        keys = args.delta_key_heads
        values = args.delta_value_heads
        self.args = args
        self.group = values // keys
        self.key_size = args.delta_key_size
        self.value_size = args.delta_value_size
        self.mix: Mix = mix_rows
        """Context parallelism, where a rank holds a part of each row, and generation replace it."""
        width = keys * self.key_size
        value_width = values * self.value_size
        self.in_proj_qkvz = nn.Linear(args.dim, 2 * (width + value_width), bias=False)
        self.in_proj_ba = nn.Linear(args.dim, 2 * values, bias=False)
        self.q_conv = PerHead(width, args.delta_conv_size)
        self.k_conv = PerHead(width, args.delta_conv_size)
        self.v_conv = PerHead(value_width, args.delta_conv_size)
        self.A_log = PerHead(values)
        self.dt_bias = PerHead(values)
        self.norm = RMSNorm(self.value_size, eps=args.norm_eps)
        self.out_proj = nn.Linear(value_width, args.dim, bias=False)

    def weights(self) -> DeltaWeights:
        """The weights of this rank's heads."""
        size = self.key_size
        return DeltaWeights(
            self.q_conv().unflatten(0, (-1, size)),
            self.k_conv().unflatten(0, (-1, size)),
            self.v_conv().unflatten(0, (-1, self.group * self.value_size)),
            self.A_log().unflatten(0, (-1, self.group)),
            dt_bias=self.dt_bias().unflatten(0, (-1, self.group)),
        )

    def cost(self, seq_len: int) -> Cost:
        """The rule runs in fp32, on copies of queries, keys and values, and keeps what its chunks
        compute.
        """
        args = self.args
        values = self.out_proj.in_features
        keys = self.in_proj_qkvz.out_features // 2 - values
        chunks = 2 * (4 * args.delta_value_heads * self.key_size + 6 * values)
        extra = values + 2 * (2 * keys + values) + chunks
        heads = Heads(
            queries=keys,
            keys=keys,
            values=values,
            out=values,
            flops=rule_flops(args, seq_len),
            backward=2.0,
            gates=2 * args.delta_value_heads,
        )
        return Cost(
            products=products_of(self, ("in_proj_qkvz", "in_proj_ba", "out_proj")),
            gathered=(args.dim,),
            moved=6 * keys + 2 * values + 2 * extra,
            saved=args.dim + 2 * (keys + values) + extra,
            heads=heads,
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        mask: DocumentMask | None = None,
    ) -> Tensor:
        """
        Args:
            cos, sin: unused: the order of tokens is in the state.
            mask: its documents don't see each other. Default: a row is one document.
        """
        documents = None if mask is None else mask.documents
        values = self.group * self.value_size
        qkvz = self.in_proj_qkvz(x).unflatten(-1, (-1, 2 * (self.key_size + values)))
        ba = self.in_proj_ba(x).unflatten(-1, (-1, 2 * self.group))
        qkv, z = qkvz.split([2 * self.key_size + values, values], -1)
        out = self.norm(self.mix(qkv, ba, self.weights(), documents))
        gate = F.silu(z.unflatten(-1, (self.group, -1)).flatten(2, 3).float())
        return self.out_proj((out * gate).to(x.dtype).flatten(2))
