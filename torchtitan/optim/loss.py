"""Losses of rows, as sums over tokens; and their tally by data source.

Dividing sums by the global token count makes the loss exact under every layout.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from torchtitan.config.registry import Custom, losses
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.models.layers.linear import multiplies_to_fp32
from torchtitan.parallel.collectives import all_reduce, unsharded
from torchtitan.parallel.mesh import Mesh
from torchtitan.utils.errors import UserError

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps logits `[batch, seq, vocab]` and labels `[batch, seq]` to the sum of each row's token
losses, fp32 `[batch]`. A token whose label is `IGNORE_INDEX` has none.
"""
Project = Callable[[Tensor, Tensor], Tensor]
"""Maps final hidden states `[batch, seq, dim]` and the output weight `[vocab, dim]` to logits."""

# ---- what a loss costs, for plans

MOVED_BYTES = {"eager": 36, "compiled": 12}
"""Bytes moved per logit by softmax and cross-entropy in fp32, forward and backward: 9 passes, or 3
when compiled into one kernel. Counted.
"""
FORWARD_SHARE = 1 / 3
"""Share of these that the forward moves. Counted."""
LOGIT_BYTES = {"compiled": 4, "compiled, sharded": 10, "eager": 12, "eager, sharded": 16}
"""Bytes per logit at the peak. Compiled: bf16 logits and their gradient; sharding the vocabulary
ends inductor's kernel at each all-reduce, with two copies in fp32 beside the logits. Eager: bf16
logits, fp32 logits, softmax and gradient less what is freed by then; sharding the vocabulary keeps
one more copy in fp32. As traced.
"""
CHUNK_MOVED_BYTES = {"in products": 8, "beside them": 12}
"""Bytes moved per parameter of the output projection for each chunk. Products of bf16 read and
write the sum of its gradient in fp32 (4 + 4); elsewhere, they write a gradient in bf16 (2), which
is read (2) and added (4 + 4). The first reads no sum; rounding the last takes as much. Counted.
"""
CHUNK_GRADIENT_BYTES = 6
"""Bytes held per parameter of the output projection: the sum of its gradient in fp32 (4), and a
chunk's gradient or the rounded sum in bf16 (2).
"""

# ---- losses


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Each row's sum of the token cross-entropies, in fp32.

    Args:
        logits: `[batch, seq, vocab]`; if sharded over the vocabulary, a DTensor, within
        `loss_context`.
        labels: `[batch, seq]`; `IGNORE_INDEX` is skipped.

    Returns:
        `[batch]`.
    """
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(0, 1),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return unsharded(loss).view(labels.shape).sum(1)


class _ShardedLogSumExp(torch.autograd.Function):
    """`apply(logits, group)`: the log-sum-exp of rows that are sharded over the ranks of `group`.

    All ranks compute the same loss from it, so the upstream gradient is whole on each.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = logits.amax(dim=-1)
        largest = funcol.wait_tensor(funcol.all_reduce(largest, "max", group))
        sums = (logits - largest.unsqueeze(-1)).exp_().sum(dim=-1)
        log_z = funcol.wait_tensor(funcol.all_reduce(sums, "sum", group)).log() + largest
        ctx.save_for_backward(logits, log_z)
        return log_z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, log_z = ctx.saved_tensors
        return (logits - log_z.unsqueeze(-1)).exp_() * gradient.unsqueeze(-1), None


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Each row's sum of squared log-sum-exps, fp32 `[batch]` (Chowdhery et al., arXiv:2204.02311,
    section 5). Arguments as for `cross_entropy`.
    """
    logits_fp32 = logits.float()
    if isinstance(logits_fp32, DTensor):
        group = logits_fp32.device_mesh.get_group()
        log_z = _ShardedLogSumExp.apply(logits_fp32.to_local(), group)
    else:
        log_z = logits_fp32.logsumexp(dim=-1)
    return log_z.square().masked_fill(labels == IGNORE_INDEX, 0.0).sum(1)


def add_z_loss(loss: RowLoss, coefficient: float) -> RowLoss:
    """`loss` with the z-loss's gradients added. Its values stay the same, so that reports can be
    compared with other runs and with validation.
    """

    def loss_with_z(logits: Tensor, labels: Tensor) -> Tensor:
        rows = loss(logits, labels)
        if not torch.is_grad_enabled():
            return rows
        regularizer = coefficient * z_loss(logits, labels)
        return rows + (regularizer - regularizer.detach())

    return loss_with_z


def build_loss(name: str, custom: Custom, z_loss: float = 0.0) -> RowLoss:
    """The loss that `training.loss` names. A registered loss is made by `make([keys])`.

    It must be a sum over tokens, so that any rank may compute it for any tokens: it is called with
    slices of the sequence (`training.loss_chunks`, context parallelism) and of the batch
    (accumulation, pipelines), and the framework divides by the tokens of the global batch. Under
    tensor parallelism, the logits are a DTensor sharded over the vocabulary, on which torch's
    operations give the results of the whole tensor. With `compile.enable`, it is compiled as one
    graph.

    Args:
        z_loss: `training.z_loss`, added to any loss.

    Raises:
        UserError: a registered loss isn't such a sum.
    """
    loss = _base_loss(name, custom)
    return add_z_loss(loss, z_loss) if z_loss else loss


@_disable_current_modes()  # tensors of a rehearsal have no values
def _base_loss(name: str, custom: Custom) -> RowLoss:
    make = losses.maker(name, custom)
    if make is None:
        return cross_entropy
    loss: RowLoss = make()
    if problem := _sum_problem(loss):
        raise UserError(f'training.loss: "{name}" {problem}')
    return lambda logits, labels: unsharded(loss(logits, labels))


@torch.no_grad()
def _sum_problem(loss: RowLoss) -> str | None:
    """Why a loss isn't a sum over tokens, judging by some small logits; None if it is."""
    logits = torch.sin(torch.arange(2.0 * 4 * 8)).view(2, 4, 8)
    labels = torch.tensor([[1, 2, 3, 4], [5, IGNORE_INDEX, 7, IGNORE_INDEX]])
    whole = loss(logits, labels)
    returns = type(whole).__name__
    if isinstance(whole, Tensor):
        returns = f"{whole.dtype} {list(whole.shape)}"
    if returns != "torch.float32 [2]":
        return (
            f"maps logits [2, seq, vocab] to {returns}; it must return the sum of each row's "
            "losses, float32 [2]"
        )
    if loss(logits, torch.full_like(labels, IGNORE_INDEX)).abs().sum() > 0:
        return f"gives a loss to tokens whose label is {IGNORE_INDEX}; they must not count"
    rows = torch.cat([loss(logits[i : i + 1], labels[i : i + 1]) for i in range(2)])
    halves = loss(logits[:, :2], labels[:, :2]) + loss(logits[:, 2:], labels[:, 2:])
    if not (torch.allclose(whole, rows, rtol=1e-4) and torch.allclose(whole, halves, rtol=1e-4)):
        return (
            "is not a sum over tokens: a row's loss must be the sum of its parts'; return "
            "sums, not means"
        )
    return None


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    project: Project,
    loss: RowLoss,
    chunks: int,
    tp_degree: int,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`loss(project(hidden, weight), labels)` by slices of the sequence.

    Only one slice's logits exist at a time. The gradients are computed together with the loss, from
    the same logits, so the backward needs no second projection. The weight's gradients are
    accumulated in fp32.

    Args:
        hidden: `[batch, seq / tp_degree, dim]`, this rank's part of the sequence.
        labels: `[batch, seq]`.
        chunks: number of slices; divides `seq / tp_degree`.
        factors: `[losses]`, factors of several losses: `hidden` is then
            `[batch, seq / tp_degree, losses * dim]`, and `labels` are `[batch, seq, losses]`. The
            first factor is 1.

    Returns:
        The sum over all rows, and, without a gradient, each row's loss `[batch]`. With `factors`,
        the sum is the first loss's, but its backward computes the gradients of all losses, each
        times its factor; and the rows' losses are `[batch, losses]`.
    """
    labels_by_loss = labels if factors is not None else labels.unsqueeze(-1)
    count = labels_by_loss.shape[-1]
    # Projecting gathers the parts of all ranks, so each slice has all ranks' labels.
    label_chunks = labels_by_loss.unflatten(1, (tp_degree, -1)).chunk(chunks, dim=2)
    label_slices = [y for chunk in label_chunks for y in chunk.flatten(1, 2).unbind(-1)]
    slices = list(zip(_slices(hidden, chunks, count), label_slices, strict=True))
    if torch.is_grad_enabled():
        loss_sum, rows = _ChunkedLoss.apply(hidden, weight, slices, project, loss, factors)
    else:
        losses = torch.stack([loss(project(h, weight), y) for h, y in slices])
        rows = losses.unflatten(0, (chunks, count)).sum(0).T
        loss_sum = rows[:, 0].sum()
    return loss_sum, rows if factors is not None else rows[:, 0]


def _slices(hidden: Tensor, chunks: int, count: int) -> list[Tensor]:
    """Slices of the sequence, of each loss's hidden states."""
    return [part for chunk in hidden.chunk(chunks, dim=1) for part in chunk.chunk(count, dim=-1)]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        slices: list[tuple[Tensor, Tensor]],
        project: Project,
        loss: RowLoss,
        factors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        count = 1 if factors is None else len(factors)
        rows = torch.zeros(count, len(hidden), device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_slices = _slices(grad_hidden, len(slices) // count, count)
        gradient_sum = _GradientSum(weight.detach().requires_grad_())
        for i, (hidden_slice, labels) in enumerate(slices):
            hidden_slice = hidden_slice.detach().requires_grad_()
            with torch.enable_grad():
                with gradient_sum:
                    logits = project(hidden_slice, gradient_sum.weight)
                row_losses = loss(logits, labels)
                loss_sum = (
                    row_losses.sum() if factors is None else row_losses.sum() * factors[i % count]
                )
                hidden_gradient, weight_gradient = torch.autograd.grad(
                    loss_sum, (hidden_slice, gradient_sum.weight), allow_unused=True
                )
            rows[i % count] += row_losses.detach()
            grad_slices[i].copy_(hidden_gradient)
            if weight_gradient is not None:
                gradient_sum.add(weight_gradient)
        ctx.dtype = weight.dtype
        ctx.save_for_backward(grad_hidden, gradient_sum.total)
        losses = rows.T.contiguous()
        ctx.mark_non_differentiable(losses)
        return rows[0].sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, weight_sum = ctx.saved_tensors
        # Not in place: a pipeline schedule that splits the backward runs this twice.
        grad_weight = torch.empty_like(weight_sum, dtype=ctx.dtype)
        torch.mul(weight_sum, upstream[0], out=grad_weight)  # scaled and rounded in one pass
        return grad_hidden * upstream[0], grad_weight, None, None, None, None


class _GradientSum(TorchFunctionMode):
    """The sum in fp32 of the gradients of `weight`.

    While it is entered, linear layers with this weight add to it in their backward, where a product
    of plain tensors can. Gradients of others are left to autograd, and to `add`.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight
        self.total: Tensor | None = None
        # DTensors and tensors in Float8 have operations of their own.
        self._is_plain = multiplies_to_fp32(weight) and not is_traceable_wrapper_subclass(weight)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_linear = function is F.linear and not kwargs and args[1] is self.weight
        if is_linear and self._is_plain and (*args, None)[2] is None:
            logits = _SummedLinear.apply(args[0].flatten(0, -2), self.weight, self)
            return logits.unflatten(0, args[0].shape[:-1])
        return function(*args, **(kwargs or {}))

    def add(self, gradient: Tensor) -> None:
        self.total = gradient.float() if self.total is None else self.total.add_(gradient)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add `a @ b`."""
        if self.total is None:
            self.total = torch.mm(a, b, out_dtype=torch.float32)
        else:
            addmm = torch.ops.aten.addmm.dtype_out
            addmm(self.total, a, b, torch.float32, out=self.total)


class _SummedLinear(torch.autograd.Function):
    """`apply(x, weight, gradient_sum)`: `[rows, dim], [vocab, dim] -> [rows, vocab]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient_sum: _GradientSum) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient_sum = gradient_sum
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.gradient_sum.add_product(gradient.T, x)
        return gradient @ weight, None, None


class SourceTally:
    """Sums the loss, tokens and bytes of each data source, without waiting for the device."""

    def __init__(self, sources: int, byte_lengths: NDArray, device: torch.device):
        """
        Args:
            sources: number of data sources.
            byte_lengths: `[vocab]`, bytes of text of each token.
        """
        self._bytes = torch.from_numpy(byte_lengths).to(device)
        self._sums = torch.zeros(3, sources, dtype=torch.float64, device=device)
        self._index = torch.arange(sources, device=device)

    def add(self, sources: Tensor, losses: Tensor, labels: Tensor) -> None:
        """Add rows.

        Args:
            sources: `[batch]`, the index of each row's source.
            losses: `[batch]`.
            labels: `[batch, seq]`.
        """
        has_label = labels != IGNORE_INDEX
        tokens = has_label.sum(1)
        lengths = (self._bytes[labels.clamp(min=0)] * has_label).sum(1)
        values = torch.stack([losses.double(), tokens.double(), lengths.double()])
        # Not `index_add_`, whose order of additions differs from run to run on CUDA.
        membership = sources[:, None] == self._index
        self._sums += values @ membership.double()

    def take(self, mesh: Mesh) -> list[list[float]]:
        """Loss, tokens and bytes of each source, over all ranks; restarts from zero."""
        sums = all_reduce(self._sums.clone(), mesh.loss_group)
        self.clear()
        return sums.T.tolist()

    def clear(self) -> None:
        self._sums.zero_()
