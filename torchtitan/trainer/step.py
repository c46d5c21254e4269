"""One forward, shared by training and validation; and the training step."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.data import StepBatch
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_sum
from torchtitan.distributed.collectives import all_reduce, clip_grad_norm
from torchtitan.distributed.mesh import Mesh


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step's forward and backward, over all ranks."""

    loss: float
    grad_norm: float
    tokens: int
    local_loss: float
    """Mean loss of this rank's own tokens."""

    @property
    def finite(self) -> bool:
        return all(x - x == 0 for x in (self.loss, self.grad_norm))


def forward_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Summed loss of one microbatch; tokens and labels `[batch, seq]` on the compute device."""
    return cross_entropy_sum(model(tokens), labels)


def count_tokens(labels: Tensor, mesh: Mesh, device: torch.device) -> Tensor:
    """Predicted tokens over all ranks, a scalar on `device`."""
    return all_reduce((labels != IGNORE_INDEX).sum().to(device), mesh.loss_group)


def forward_backward(
    model: FSDPModule, batch: StepBatch, mesh: Mesh, device: torch.device, local_batch_size: int, max_norm: float
) -> StepResult:
    """Gradients of one global batch, clipped; the optimizer is not touched.

    The loss of every microbatch is divided by the token count of the whole global batch, and gradients are summed over
    ranks: so neither accumulation nor the number of ranks nor padding changes the result.
    """
    total = count_tokens(batch.labels, mesh, device).clamp(min=1)
    loss = torch.zeros((), device=device)
    tokens = batch.tokens.split(local_batch_size)
    for i, (inputs, labels) in enumerate(zip(tokens, batch.labels.split(local_batch_size), strict=True)):
        last = i == len(tokens) - 1
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        part = forward_loss(model, inputs, labels) / total
        part.backward()
        loss += part.detach()
    norm = clip_grad_norm(model.parameters(), max_norm)
    own = loss.clone()
    all_reduce(loss, mesh.loss_group)
    # One read-back for all: on CUDA this is the step's only wait for the device.
    values = torch.stack([x.double() for x in (loss, norm.to(device), total, own)]).tolist()
    local_tokens = max(int((batch.labels != IGNORE_INDEX).sum()), 1)
    return StepResult(values[0], values[1], int(values[2]), values[3] * values[2] / local_tokens)


def max_over_ranks(value: float, mesh: Mesh, device: torch.device) -> float:
    """The largest of the ranks' values."""
    return all_reduce(torch.tensor(value, device=device), mesh.loss_group, dist.ReduceOp.MAX).item()
