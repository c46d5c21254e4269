"""Mixture of experts: a router sends each token to some of many feed-forward networks.

No token is dropped.

Shapes: b batch, s sequence, t = b * s tokens, k experts of a token, e experts, n = t * k rows.

    x [b, s, dim] -> router -> the experts of each token [t, k] and their weights
                  -> dispatch: a row for each token and expert, sorted by expert [n, dim]
                  -> experts: one grouped product for all of them [n, dim]
                  -> combine: each token's rows, weighted and summed [b, s, dim]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.decoder_args import Activation, DecoderArgs
from torchtitan.models.feed_forward import FeedForward, activate
from torchtitan.models.grouped import grouped_bias, grouped_mm, grouped_swiglu
from torchtitan.models.layers import TokenLinear


@dataclass(frozen=True)
class Balance:
    """What keeps the experts equally loaded. A coefficient of 0 is off."""

    sequence_loss: float = 0.0
    """Coefficient of the loss of each row (DeepSeek-V3, arXiv:2412.19437, equation 17)."""
    global_loss: float = 0.0
    """Coefficient of the loss of the global batch (Qiu et al., arXiv:2501.11873)."""
    z_loss: float = 0.0
    """Coefficient of the router z-loss (Zoph et al., ST-MoE, arXiv:2202.08906, equation 5)."""
    forced: bool = False
    """Send tokens to the experts in turn instead of by the router's scores."""

    @property
    def has_loss(self) -> bool:
        return bool(self.sequence_loss or self.global_loss or self.z_loss)


class Load(NamedTuple):
    """How a router distributed the tokens that count in the loss."""

    tokens: Tensor
    """`[e]` int64, rows of each expert."""
    loss: Tensor
    """The auxiliary losses of these tokens, a scalar."""


class Routed(NamedTuple):
    """Tokens on their way to the experts, or back."""

    rows: Tensor
    """`[n, dim]`, sorted by expert."""
    ends: Tensor
    """`[e]` int32, the index after each expert's last row."""
    weights: Tensor
    """`[t, k]`, the weights of each token's experts."""
    place: Tensor
    """`[n]`, where in `rows` the k-th row of a token is."""
    order: Tensor
    """`[n]`, the inverse of `place`."""
    load: Load | None
    """None if no token counts: in inference."""


class Gate(TokenLinear):
    """Scores of all experts, in fp32: `[b, s, dim] -> [b, s, e]`."""

    def compute(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


class Router(nn.Module):
    """Chooses the experts of each token by their scores."""

    expert_bias: Tensor
    """`[e]` fp32, added to the probabilities for the choice (Wang et al., arXiv:2408.15664)."""
    load: Tensor
    """`[e]` int64, rows of each expert in the last step."""
    step_load: Tensor
    """`[e]` int64, rows of each expert in the step that runs, on this rank so far."""
    step_loss: Tensor
    """The auxiliary losses of the step that runs, on this rank so far."""

    def __init__(self, args: DecoderArgs):
        super().__init__()
        self.n_experts = args.n_experts
        self.top_k = args.experts_per_token
        self.sigmoid = args.router_scores == "sigmoid"
        self.normalize = args.normalize_expert_weights
        self.scale = args.route_scale
        self.n_groups = args.n_expert_groups
        self.top_groups = args.expert_groups_per_token
        self.balance = Balance()
        self.sum_over_row: Callable[[Tensor], Tensor] = lambda counts: counts
        """Sums counts over the ranks that hold parts of the same rows."""
        self.gate = Gate(args.dim, args.n_experts, args.router_bias)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Start with no load and no bias. Called again when a meta model gets memory."""
        no_rows = torch.zeros(self.n_experts, dtype=torch.int64)
        self.register_buffer("expert_bias", torch.zeros(self.n_experts))
        self.register_buffer("load", no_rows)
        self.register_buffer("step_load", no_rows.clone(), persistent=False)
        self.register_buffer("step_loss", torch.zeros(()), persistent=False)

    def forward(
        self, x: Tensor, token_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Load | None]:
        """
        Args:
            x: `[b, s, dim]`.
            token_weights: `[b, s]`, weight of each token in the loss; 0 doesn't count.

        Returns:
            The experts of each token `[b, s, k]`, their weights `[b, s, k]`, and the load.
        """
        scores = self.gate(x)
        probabilities = scores.sigmoid() if self.sigmoid else scores.softmax(dim=-1)
        chosen = self._choose(probabilities.detach())
        weights = probabilities.gather(-1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * self.scale
        if token_weights is None:
            return chosen, weights, None
        counts = _count(chosen, token_weights > 0, self.n_experts)
        loss = torch.zeros((), device=x.device)
        if self.balance.has_loss:
            loss = (self._losses(scores, probabilities, counts) * token_weights).sum()
            weights = _AddLoss.apply(weights, loss)
        return chosen, weights, Load(counts.sum(0), loss.detach())

    def record(self, load: Load) -> None:
        """Add to the load of the step. `forward` doesn't, because recomputation runs it twice."""
        self.step_load += load.tokens
        self.step_loss += load.loss

    def _choose(self, probabilities: Tensor) -> Tensor:
        if self.balance.forced:
            rows, seq_len, _ = probabilities.shape
            turns = torch.arange(rows * seq_len * self.top_k, device=probabilities.device)
            return (turns % self.n_experts).view(rows, seq_len, self.top_k)
        choice = probabilities + self.expert_bias
        return top_k(self._in_groups(choice), self.top_k)

    def _in_groups(self, choice: Tensor) -> Tensor:
        """Leave out the experts of all but each token's best groups (DeepSeek-V3, section 2.1.2).

        A group is as good as its best expert; with sigmoid scores, as its two best together.
        """
        if self.top_groups == self.n_groups:
            return choice
        groups = choice.unflatten(-1, (self.n_groups, -1))
        best = min(2 if self.sigmoid else 1, groups.shape[-1])
        kept = top_k(groups.topk(best, dim=-1).values.sum(-1), self.top_groups)
        out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        # not by zeros: biased scores can be negative
        return groups.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)

    def _losses(
        self,
        scores: Tensor,
        probabilities: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """Auxiliary losses of each token, `[b, s]`: linear in its probabilities, given the shares.

        A row's loss uses the shares of its experts. The loss of the global batch uses those of the
        last step: this step's are known only after the forward of its last microbatch, when the
        gradients of others are already computed.
        """
        if self.sigmoid:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        factors = torch.zeros_like(probabilities[:, :1])
        if self.balance.sequence_loss:
            of_rows = self.sum_over_row(counts).float()
            shares = of_rows / of_rows.sum(dim=-1, keepdim=True).clamp(min=1)
            factors = factors + self.balance.sequence_loss * shares[:, None]
        if self.balance.global_loss:
            rows = self.load.sum().clamp(min=1)
            factors = factors + self.balance.global_loss * self.load / rows
        losses = self.n_experts * (factors * probabilities).sum(dim=-1)
        if self.balance.z_loss:
            losses = losses + self.balance.z_loss * scores.logsumexp(dim=-1) ** 2
        return losses


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest of the last dimension, in order; among equals, the lower index.

    For fp32. `torch.topk` breaks ties differently on each device. Here there are none: scores
    become integers of the same order, with the index in the low half.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = scores.shape[-1] - 1
    index = last - torch.arange(last + 1, device=scores.device)
    keys = (ordered.long() << 32) | index
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def _count(
    chosen: Tensor,
    counted: Tensor,
    n_experts: int,
) -> Tensor:
    """How many counted tokens of each row were sent to each expert: `[b, e]` int64."""
    ones = counted.unsqueeze(-1).expand_as(chosen).flatten(1).long()
    counts = torch.zeros(
        len(chosen),
        n_experts,
        dtype=torch.int64,
        device=chosen.device,
    )
    return counts.scatter_add(1, chosen.flatten(1), ones)


class _AddLoss(torch.autograd.Function):
    """Returns its first input. The backward behaves as if the second were added to the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        loss: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        one = None if gradient is None else gradient.new_ones((), dtype=torch.float32)
        return gradient, one


class _Spread(torch.autograd.Function):
    """Rows of tokens, sorted by expert: `[t, dim] -> [n, dim]`. The backward needs no atomics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order: Tensor,
        place: Tensor,
        k: int,
    ) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return F.embedding_bag(place.view(-1, ctx.k), gradient, mode="sum"), None, None, None


class _Gather(torch.autograd.Function):
    """The weighted sum of each token's rows, without copying them: `[n, dim] -> [t, dim]`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        order: Tensor,
        place: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, order, place)
        return F.embedding_bag(
            place.view_as(weights),
            rows,
            mode="sum",
            per_sample_weights=weights,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, order, place = ctx.saved_tensors
        of_rows = gradient.index_select(0, order // weights.shape[1])
        of_weights = (rows * of_rows).sum(-1).index_select(0, place).view_as(weights)
        row_weights = weights.flatten().index_select(0, order)
        return of_rows.mul_(row_weights.unsqueeze(-1)), of_weights, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        index: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def permute(
    rows: Tensor,
    index: Tensor,
    inverse: Tensor,
) -> Tensor:
    """`rows[index]`, deterministic in both directions. `inverse` is the inverse of `index`."""
    return _Permute.apply(rows, index, inverse)


def inverse_of(permutation: Tensor) -> Tensor:
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
        """Low precision replaces it."""

    def forward(
        self,
        rows: Tensor,
        ends: Tensor,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """
        Args:
            rows: `[n, dim]`, sorted by expert.
            ends: `[e]` int32, the index after each expert's last row.
            meanwhile: called once, while rows travel if experts are on several ranks.
        """
        meanwhile()
        return self.compute(rows, ends, *self.parameters())

    def compute(
        self,
        rows: Tensor,
        ends: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """The experts' networks. Subclasses override this, not `forward`, which expert parallelism
        replaces.

        Args:
            rows: `[n, dim]`, sorted by expert.
            ends: `[e]` int32, the index after each expert's last row.
            weights: the module's parameters, in order; under expert parallelism, of this rank's
                experts.
        """
        if len(weights) == 3 and self.activation == "swiglu" and self.product is grouped_mm:
            w1, w2, w3 = weights
            return grouped_swiglu(rows, w1, w2, w3, ends)
        named = {name: w for (name, _), w in zip(self.named_parameters(), weights, strict=True)}

        def linear(x: Tensor, number: int) -> Tensor:
            out = self.product(x, named[f"w{number}"], ends)
            bias = named.get(f"b{number}")
            return out if bias is None else grouped_bias(out, bias, ends)

        gate = linear(rows, 1)
        up = linear(rows, 3) if "w3" in named else None
        return linear(activate(self.activation, gate, up), 2)


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

    def compute(
        self,
        routed: Routed,
        read: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The experts' output for each row `[n, dim]`, and the shared expert's `[b, s, dim]`.

        Args:
            read: what the shared expert reads, `[b, s, dim]`; None without one.
        """
        if read is None:
            return self.experts(routed.rows, routed.ends), None
        shared: list[Tensor] = []
        rows = self.experts(
            routed.rows, routed.ends, lambda: shared.append(self.shared_output(read))
        )
        return rows, shared[0]

    def shared_output(self, x: Tensor) -> Tensor:
        """The output of the expert that all tokens share: `[b, s, dim] -> [b, s, dim]`."""
        assert self.shared is not None
        out = self.shared(x)
        if self.shared_gate is None:
            return out
        return out * self.shared_gate(x).sigmoid().to(out.dtype)

    def dispatch(
        self,
        x: Tensor,
        token_weights: Tensor | None,
    ) -> Routed:
        """Choose experts for the tokens of `x` `[b, s, dim]`, and sort a row for each by expert."""
        chosen, weights, load = self.router(x, token_weights)
        by_token = chosen.flatten()
        by_expert, order = by_token.sort(stable=True)
        experts = torch.arange(self.router.n_experts, device=x.device)
        ends = torch.searchsorted(
            by_expert,
            experts,
            right=True,
            out_int32=True,
        )
        place = inverse_of(order)
        rows = _Spread.apply(x.flatten(0, 1), order, place, self.router.top_k)
        return Routed(rows, ends, weights.flatten(0, 1), place, order, load)

    def combine(
        self,
        rows: Tensor,
        routed: Routed,
        like: Tensor,
    ) -> Tensor:
        """Sum each token's rows by their weights, into a tensor like `like` `[b, s, dim]`."""
        weights = routed.weights.to(rows.dtype)
        out = _Gather.apply(rows, weights, routed.order, routed.place)
        return out.to(like.dtype).view_as(like)
