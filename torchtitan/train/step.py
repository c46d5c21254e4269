"""The training step: forward, backward, clip, update."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.schema import Config
from torchtitan.config.support import FLOAT8, uses
from torchtitan.data.loader import StepBatch
from torchtitan.data.rows import IGNORE_INDEX
from torchtitan.optim.optimizer import OptimizerInBackward
from torchtitan.parallel.collectives import AnyRank, all_reduce, clip_grad_norm, combined_norm
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.quantize import refresh_scales
from torchtitan.train.compute import LocalBatch
from torchtitan.train.state import Parts
from torchtitan.utils.device import device_syncs
from torchtitan.utils.phase import note


@dataclass(frozen=True)
class BackwardResult:
    """Outcome of a forward and backward, over all ranks."""

    loss: float
    grad_norm: float
    tokens: int
    local_loss: float
    """Mean loss of this rank's own tokens; 0 where a pipeline's last stage is elsewhere."""
    stop: bool
    """Some rank had been asked to stop when the step began."""


@dataclass(frozen=True)
class StepResult(BackwardResult):
    """Outcome of a step."""

    learning_rate: float
    updated: bool
    """The weights were updated."""


def train_step(
    parts: Parts,
    batch: StepBatch,
    config: Config,
    *,
    stop: bool,
    agree: bool,
    approve: Callable[[float, float], bool],
    before_update: Callable[[], None],
) -> StepResult:
    """Train on one global batch.

    Args:
        stop, agree: as in `forward_backward`.
        approve: whether to update the weights, given the loss and the gradient norm.
        before_update: called before any weight changes.
    """
    learning_rate = parts.schedule.apply()
    if isinstance(parts.optimizer, OptimizerInBackward):
        before_update()
    training = config.training
    result = forward_backward(parts, batch, training.local_batch_size, training.max_norm, stop, agree=agree)
    before_update()
    note("updating the weights")
    updated = approve(result.loss, result.grad_norm)
    if updated:
        parts.optimizer.step()
        prepare_weights(parts, config)
    parts.optimizer.zero_grad(set_to_none=True)
    return StepResult(**vars(result), learning_rate=learning_rate, updated=updated)


def prepare_weights(parts: Parts, config: Config) -> None:
    """Compute what depends on the weights alone and is needed before the next forward."""
    if uses(config, FLOAT8) and config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp:
        refresh_scales(parts.models)


def forward_backward(
    parts: Parts, batch: StepBatch, local_batch_size: int, max_norm: float, stop: bool = False, *, agree: bool = False
) -> BackwardResult:
    """Compute the gradients of one global batch and clip them.

    The loss of every microbatch is divided by the token count of the whole global batch, and gradients are summed over
    ranks. So accumulation, the number of ranks and padding don't change the result.

    Args:
        stop: this rank was asked to stop. All ranks learn about it here, and so act after the same step.
        agree: make loss and gradient norm bit-identical on all ranks.
    """
    asked = AnyRank(stop, parts.device)
    rows = parts.compute.own_rows(batch.tokens, batch.labels)
    local_tokens = (rows.labels != IGNORE_INDEX).sum()
    loss, norm, total, own = gradients(parts, rows, local_tokens, local_batch_size, max_norm)
    # One read-back for all: on CUDA this is the step's only wait for the device.
    with device_syncs(report=False):
        outcome = torch.stack([x.double() for x in (loss, norm)])
        if agree:
            outcome = all_reduce(outcome, dist.group.WORLD) / dist.get_world_size()
        rest = torch.stack([x.double() for x in (total, own, asked.answer())])
        values = torch.cat([outcome, rest]).tolist()
    local_loss = values[3] * values[2] / max(int(local_tokens), 1)
    return BackwardResult(values[0], values[1], int(values[2]), local_loss, stop=values[4] > 0)


def gradients(
    parts: Parts, rows: LocalBatch, local_tokens: Tensor, local_batch_size: int, max_norm: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The device's part of a step, during which the host never waits for it. The planner traces this function.

    Args:
        rows: this rank's part of the global batch.
        local_tokens: how many of its tokens are predicted.

    Returns:
        Loss, gradient norm, predicted tokens of the whole batch, and this rank's share of the loss; scalars.
    """
    mesh, device, compute = parts.mesh, parts.device, parts.compute
    total = all_reduce(local_tokens.to(device, copy=True), mesh.batch_group).clamp(min=1)
    loss = torch.zeros((), device=device)
    batches = rows.to(device).split(local_batch_size)  # all at once: each copy from pageable memory may wait
    for i, part in enumerate(batches, 1):
        note(f"running forward and backward of batch {i} of {len(batches)}")
        loss += compute.forward_backward(part, total, last=i == len(batches))
    norm = _grad_norm(parts, max_norm)
    own = loss.clone()
    all_reduce(loss, mesh.loss_group)
    return loss, norm, total, own


def _grad_norm(parts: Parts, max_norm: float) -> Tensor:
    pp_group = parts.mesh.group("pp")
    if isinstance(parts.optimizer, OptimizerInBackward):
        return combined_norm(parts.optimizer.take_norms(), pp_group, parts.device)
    params = [p for model in parts.models for p in model.parameters()]
    return clip_grad_norm(params, max_norm, pp_group, parts.device)


def max_over_ranks(value: float, mesh: Mesh, device: torch.device) -> float:
    """The largest of all ranks' values."""
    return all_reduce(torch.tensor(value, device=device), mesh.loss_group, dist.ReduceOp.MAX).item()
