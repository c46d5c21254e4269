"""The router of a mixture of experts: it chooses each token's experts, and balances their load.

Shapes: b batch, s sequence, k experts of a token, e experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.models.args import DecoderArgs
from torchtitan.models.costs import FP32, Cost, products_of
from torchtitan.models.layers.linear import TokenLinear, multiplies_to_fp32


@dataclass(frozen=True)
class Balance:
    """Settings that keep the experts equally loaded. A coefficient of 0 is off."""

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
    """Distribution of the tokens that count in the loss over the experts."""

    tokens: Tensor
    """`[e]` int64, rows of each expert."""
    loss: Tensor
    """The auxiliary losses of these tokens, a scalar."""


class Gate(TokenLinear):
    """Scores of all experts, in fp32: `[b, s, dim] -> [b, s, e]`."""

    fp32 = True

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = _Scores.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return scores if bias is None else scores + bias


class _Scores(torch.autograd.Function):
    """`[rows, dim], [e, dim] -> [rows, e]` in fp32, and likewise backward. torch differentiates no
    product of bf16 that returns fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if multiplies_to_fp32(x):
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return x.float() @ weight.float().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        x_gradient = (gradient @ weight.float()).to(x.dtype)
        return x_gradient, (gradient.T @ x.float()).to(weight.dtype)


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
        experts = self._choose(probabilities.detach())
        weights = probabilities.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * self.scale
        if token_weights is None:
            return experts, weights, None
        counts = _count(experts, token_weights > 0, self.n_experts)
        loss = torch.zeros((), device=x.device)
        if self.balance.has_loss:
            loss = (self._losses(scores, probabilities, counts) * token_weights).sum()
            weights = _AddLoss.apply(weights, loss)
        return experts, weights, Load(counts.sum(0), loss.detach())

    def cost(self, seq_len: int) -> Cost:
        """Scores, softmax and choice, in fp32 and int64, are each read and written. The backward
        needs the probabilities.
        """
        return Cost(
            products=products_of(self, ("gate",)),
            moved_bytes=60 * self.n_experts,
            saved_bytes=FP32 * self.n_experts,
        )

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
        return top_k(self._mask_groups(choice), self.top_k)

    def _mask_groups(self, choice: Tensor) -> Tensor:
        """Leave out the experts of all but each token's best groups (DeepSeek-V3, section 2.1.2).

        A group's score is its best expert's; with sigmoid scores, its two best experts' sum.
        """
        if self.top_groups == self.n_groups:
            return choice
        groups = choice.unflatten(-1, (self.n_groups, -1))
        best = min(2 if self.sigmoid else 1, groups.shape[-1])
        best_groups = top_k(groups.topk(best, dim=-1).values.sum(-1), self.top_groups)
        exclude = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best_groups, False)
        # not by zeros: biased scores can be negative
        return groups.masked_fill(exclude.unsqueeze(-1), -torch.inf).flatten(-2)

    def _losses(self, scores: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Auxiliary losses of each token, `[b, s]`: linear in its probabilities, given the shares.

        A row's loss uses the experts' shares of this row. The loss of the global batch uses the
        shares of the last step: this step's shares are complete only after the forward of its last
        microbatch, when other microbatches' gradients are already computed.
        """
        if self.sigmoid:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        factors = torch.zeros_like(probabilities[:, :1])
        if self.balance.sequence_loss:
            row_counts = self.sum_over_row(counts).float()
            shares = row_counts / row_counts.sum(dim=-1, keepdim=True).clamp(min=1)
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

    For fp32. `torch.topk` breaks ties differently on each device. Here no two keys are equal:
    scores become integers of the same order, with the index in the low half.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal
    sortable = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = scores.shape[-1] - 1
    index = last - torch.arange(last + 1, device=scores.device)
    keys = (sortable.long() << 32) | index
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def _count(experts: Tensor, has_label: Tensor, n_experts: int) -> Tensor:
    """Number of each row's tokens with a label that were sent to each expert: `[b, e]` int64."""
    ones = has_label.unsqueeze(-1).expand_as(experts).flatten(1).long()
    counts = torch.zeros(len(experts), n_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add(1, experts.flatten(1), ones)


class _AddLoss(torch.autograd.Function):
    """Returns its first input. The backward behaves as if the second were added to the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        loss_gradient = None if gradient is None else gradient.new_ones((), dtype=torch.float32)
        return gradient, loss_gradient
