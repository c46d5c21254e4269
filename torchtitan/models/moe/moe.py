"""Mixture of experts: a router sends each token to some of many feed-forward networks.

No token is dropped.

Shapes: b batch, s sequence, t = b * s tokens, k experts of a token, e experts, n = t * k rows.

    x [b, s, dim] -> router -> the experts of each token [t, k] and their weights
                  -> dispatch: a row for each token and expert, sorted by expert [n, dim]
                  -> experts: one grouped product for all of them [n, dim]
                  -> combine: each token's rows, weighted and summed [b, s, dim]
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.args import Activation, DecoderArgs
from torchtitan.models.costs import Cost, cost_of, products_of
from torchtitan.models.layers.feed_forward import FeedForward, activate
from torchtitan.models.moe.grouped import grouped_bias, grouped_mm, grouped_swiglu
from torchtitan.models.moe.router import Gate, Load, Router

ROUTING_BYTES = 70
"""Bytes that a row keeps for the backward: its place in both orders, weight and expert, on its way
there and back. As traced.
"""


class Routing(NamedTuple):
    """Rows of tokens sorted by expert, and the way back to the tokens."""

    rows: Tensor
    """`[n, dim]`, sorted by expert."""
    ends: Tensor
    """`[e]` int32, the index after each expert's last row."""
    weights: Tensor
    """`[t, k]`, the weights of each token's experts."""
    position: Tensor
    """`[n]`, index in `rows` of each token's k-th row, token by token."""
    order: Tensor
    """`[n]`, the inverse of `position`."""
    load: Load | None
    """None in inference, where no token counts."""


class _Spread(torch.autograd.Function):
    """Rows of tokens, sorted by expert: `[t, dim] -> [n, dim]`. The backward needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, position: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(position)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (position,) = ctx.saved_tensors
        return F.embedding_bag(position.view(-1, ctx.k), gradient, mode="sum"), None, None, None


class _Gather(torch.autograd.Function):
    """The weighted sum of each token's rows, without copying them: `[n, dim] -> [t, dim]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, position)
        return F.embedding_bag(
            position.view_as(weights), rows, mode="sum", per_sample_weights=weights
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, order, position = ctx.saved_tensors
        grad_rows = gradient.index_select(0, order // weights.shape[1])
        grad_weights = (rows * grad_rows).sum(-1).index_select(0, position).view_as(weights)
        row_weights = weights.flatten().index_select(0, order)
        return grad_rows.mul_(row_weights.unsqueeze(-1)), grad_weights, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def permute(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`rows[index]`, deterministic in both directions.

    Args:
        inverse: the inverse of `index`; if rows are repeated, of the copies whose gradient counts.
    """
    return _Permute.apply(rows, index, inverse)


def inverse_permutation(permutation: Tensor) -> Tensor:
    """The inverse of a permutation `[n]`."""
    index = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, index)


class Experts(nn.Module):
    """Feed-forward networks of the same size, each for its own rows: `[n, dim] -> [n, dim]`."""

    def __init__(
        self,
        n_experts: int,
        dim: int,
        hidden_dim: int,
        activation: Activation = "swiglu",
        bias: bool = False,
    ):
        super().__init__()
        self.activation: Activation = activation
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        if activation != "relu2":
            self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        if bias:
            self.b1 = nn.Parameter(torch.empty(n_experts, hidden_dim))
            self.b2 = nn.Parameter(torch.empty(n_experts, dim))
        if bias and activation != "relu2":
            self.b3 = nn.Parameter(torch.empty(n_experts, hidden_dim))
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_mm
        """The grouped product; low precision replaces it."""

    def forward(
        self, rows: Tensor, ends: Tensor, meanwhile: Callable[[], None] = lambda: None
    ) -> Tensor:
        """
        Args:
            rows: `[n, dim]`, sorted by expert.
            ends: `[e]` int32, the index after each expert's last row.
            meanwhile: called once, while rows travel if experts are on several ranks.
        """
        meanwhile()
        return self.compute(rows, ends, *self.parameters())

    def compute(self, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """The experts' networks. Subclasses override this, not `forward`, which expert parallelism
        replaces.

        Args:
            rows: `[n, dim]`, sorted by expert. Rows after the last end have no expert, and their
                results are undefined.
            ends: `[e]` int32, the index after each expert's last row.
            weights: the module's parameters, in order; under expert parallelism, of this rank's
                experts.
        """
        if len(weights) == 3 and self.activation == "swiglu" and self.product is grouped_mm:
            w1, w2, w3 = weights
            return grouped_swiglu(rows, w1, w2, w3, ends=ends)
        by_name = {name: w for (name, _), w in zip(self.named_parameters(), weights, strict=True)}

        def linear(x: Tensor, number: int) -> Tensor:
            out = self.product(x, by_name[f"w{number}"], ends)
            bias = by_name.get(f"b{number}")
            return out if bias is None else grouped_bias(out, bias, ends)

        gate = linear(rows, 1)
        up = linear(rows, 3) if "w3" in by_name else None
        return linear(activate(self.activation, gate, up), 2)

    def cost(self, rows: int) -> Cost:
        """The cost of `rows` rows per token. The backward needs two of the products; in 8 bits also
        the third one's input, and what that is made of; and the clamped activation's eager one what
        is biased, clamped, and the gate's sigmoid.
        """
        hidden = rows * self.w1.shape[1]
        return Cost(
            products=products_of(self, ("w1", "w3", "w2"), rows),
            moved=(2 if self.activation == "relu2" else 3) * hidden,
            saved=2 * hidden,
            saved_eager=5 * hidden if self.activation == "clamped_swiglu" else 0,
            saved_in_8_bits=2 * hidden,
            inner=self.w1.shape[1],
        )


class MoE(nn.Module):
    """The router and the experts of a block."""

    router_class: type[Router] = Router
    """Built from `(args)`. Subclasses replace it."""
    experts_class: type[Experts] = Experts
    """Built from `(n_experts, dim, expert_dim)` and, where they aren't the defaults, `activation`
    and `bias`. Subclasses replace it.
    """

    def __init__(self, args: DecoderArgs):
        super().__init__()
        options = args.feed_forward_options
        self.router = self.router_class(args)
        self.experts = self.experts_class(args.n_experts, args.dim, args.expert_dim, **options)
        self.shared = self.shared_gate = None
        if args.shared_expert_dim:
            self.shared = FeedForward(args.dim, args.shared_expert_dim, **options)
        if args.shared_expert_gate:
            self.shared_gate = Gate(args.dim, 1)

    def cost(self, seq_len: int) -> Cost:
        """Rows are copied to be sorted, and summed. The backward needs them, what the experts
        return, and the shared expert's output.
        """
        k = self.router.top_k
        dim = self.experts.w1.shape[2]
        rows = Cost(
            moved=3 * k * dim,
            saved=2 * k * dim,
            saved_bytes=ROUTING_BYTES * k,
            launches=(54, 35, 22, 18),
        )
        cost = rows + cost_of(self.router, seq_len, "router")
        if self.shared is not None:
            cost += Cost(saved=dim) + cost_of(self.shared, seq_len, "shared")
            cost += Cost(products=products_of(self, ("shared_gate",)))
        return cost + cost_of(self.experts, k, "experts")

    def compute(self, routing: Routing, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The experts' output for each row `[n, dim]`, and the shared expert's `[b, s, dim]`.

        Args:
            inputs: of the shared expert, `[b, s, dim]`; None without one.
        """
        if inputs is None:
            return self.experts(routing.rows, routing.ends), None
        shared: list[Tensor] = []
        rows = self.experts(
            routing.rows, routing.ends, lambda: shared.append(self.shared_output(inputs))
        )
        return rows, shared[0]

    def shared_output(self, x: Tensor) -> Tensor:
        """The output of the expert that all tokens share: `[b, s, dim] -> [b, s, dim]`."""
        assert self.shared is not None
        out = self.shared(x)
        if self.shared_gate is None:
            return out
        return out * self.shared_gate(x).sigmoid().to(out.dtype)

    def dispatch(self, x: Tensor, token_weights: Tensor | None) -> Routing:
        """Choose the experts of each token of `x` `[b, s, dim]`, and sort the tokens' rows, one for
        each chosen expert, by expert.
        """
        choice, weights, load = self.router(x, token_weights)
        by_token = choice.flatten()
        by_expert, order = by_token.sort(stable=True)
        experts = torch.arange(self.router.n_experts, device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        position = inverse_permutation(order)
        rows = _Spread.apply(x.flatten(0, 1), order, position, self.router.top_k)
        return Routing(rows, ends, weights.flatten(0, 1), position, order=order, load=load)

    def combine(self, rows: Tensor, routing: Routing, like: Tensor) -> Tensor:
        """Sum each token's rows by their weights, into a tensor like `like` `[b, s, dim]`."""
        weights = routing.weights.to(rows.dtype)
        out = _Gather.apply(rows, weights, routing.order, routing.position)
        return out.to(like.dtype).view_as(like)
