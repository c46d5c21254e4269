"""The training step: forward, backward, clip, update."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.features import FLOAT8, uses
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.optim.optimizer import OptimizerInBackward, ShardedAdam
from torchtitan.parallel.collectives import AnyRank, SquaredNorm, all_reduce, scale
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.quantize import refresh_scales
from torchtitan.train.forward import LocalBatch
from torchtitan.train.state import Parts
from torchtitan.utils.activity import note
from torchtitan.utils.device import device_syncs


@dataclass(frozen=True)
class BackwardResult:
    """Outcome of a forward and backward, over all ranks."""

    loss: float
    grad_norm: float
    tokens: int
    """Predicted."""
    read: int
    """Tokens of the batch, predicted or not."""
    local_loss: float
    """Mean loss of this rank's own tokens; 0 where a pipeline's last stage is elsewhere."""
    mtp_losses: tuple[float, ...]
    """Of each module of multi-token prediction."""
    stop: bool
    """Some rank had been asked to stop when the step began."""


@dataclass(frozen=True)
class StepResult(BackwardResult):
    """Outcome of a step."""

    learning_rate: float
    updated: bool
    """The weights were updated."""


def _is_finite(loss: float, grad_norm: float) -> bool:
    return math.isfinite(loss) and math.isfinite(grad_norm)


def train_step(
    parts: Parts,
    batch: StepBatch,
    config: Config,
    *,
    stop: bool = False,
    agree: bool = False,
    approve: Callable[[float, float], bool] = _is_finite,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Train on one global batch.

    Args:
        stop, agree: as in `forward_backward`.
        approve: whether to update the weights, given the loss and the gradient norm.
        before_update: called before any weight changes, with complete gradients that are not yet
            clipped; before the backward if that updates the weights.
    """
    parts.enter(batch.stage)
    learning_rate = parts.schedule.apply(batch.stage)
    max_norm = config.training.max_norm
    optimizer = parts.optimizer
    in_backward = isinstance(optimizer, OptimizerInBackward)
    # The device updates the weights ahead of the host, which then learns loss and norm with one
    # wait; but where a policy judges them first, the host must know before the weights change.
    can_skip = isinstance(optimizer, ShardedAdam) and optimizer.clips
    ahead = can_skip and not agree and not config.training.enable_cpu_offload

    def update(loss: Tensor, norm: Tensor) -> None:
        """Clip and update on the device, before the host knows whether loss and norm are finite."""
        note("updating the weights")
        assert isinstance(optimizer, ShardedAdam)
        divisor = 1 / _clip_factor(norm, max_norm) if max_norm > 0 else None
        skip = ~torch.isfinite(loss + norm)
        optimizer.step(divisor=divisor, skip=skip)
        _end_step(parts, skip)

    if in_backward:
        before_update()
    result = forward_backward(
        parts,
        batch,
        max_norm,
        stop,
        agree=agree,
        before_clip=None if in_backward else before_update,
        update=update if ahead else None,
    )
    updated = approve(result.loss, result.grad_norm)
    if not ahead:
        note("updating the weights")
        if updated:
            optimizer.step()
        rejected = None if updated else torch.ones((), dtype=torch.bool, device=parts.device)
        _end_step(parts, rejected)
    if updated:
        prepare_weights(parts, config)
    optimizer.zero_grad(set_to_none=True)
    return StepResult(**vars(result), learning_rate=learning_rate, updated=updated)


def _end_step(parts: Parts, skip: Tensor | None) -> None:
    """Update what follows from a step besides the optimizer, unless `skip` is true."""
    for part in (parts.experts, parts.qk_clip):
        if part is not None:
            part.step(skip)


def prepare_weights(parts: Parts, config: Config) -> None:
    """Compute what depends on the weights alone and is needed before the next forward."""
    if (
        uses(config, FLOAT8)
        and config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
    ):
        refresh_scales(parts.models)


def forward_backward(
    parts: Parts,
    batch: StepBatch,
    max_norm: float,
    stop: bool = False,
    *,
    agree: bool = False,
    before_clip: Callable[[], None] | None = None,
    update: Callable[[Tensor, Tensor], None] | None = None,
) -> BackwardResult:
    """Compute the gradients of one global batch and clip them.

    The loss of every microbatch is divided by the token count of the whole global batch, and
    gradients are summed over ranks. So accumulation, the number of ranks and padding don't change
    the result.

    Args:
        stop: this rank was asked to stop. All ranks learn about it here, and so act after the same
            step.
        agree: make loss and gradient norm bit-identical on all ranks, because a policy judges them.
        before_clip: called once the gradients are complete.
        update: clips and updates instead, given the loss and the gradient norm on the device.
    """
    asked = AnyRank(stop, parts.device)
    rows = parts.compute.own_rows(batch.tokens, batch.labels, batch.sources, batch.continues)
    local_tokens = int((rows.next_labels != IGNORE_INDEX).sum())
    loss, norm, total, own, mtp = gradients(
        parts, rows, local_tokens, 0.0 if update else max_norm, before_clip
    )
    if update is not None:
        update(loss, norm)
    # One read-back for all: on CUDA this is the step's only wait for the device.
    with device_syncs(report=False):
        outcome = torch.stack([x.double() for x in (loss, norm)])
        if agree:
            outcome = all_reduce(outcome, dist.group.WORLD) / dist.get_world_size()
        rest = torch.stack([x.double() for x in (total, own, asked.answer())])
        values = torch.cat([outcome, rest, mtp.double()]).tolist()
    mean_loss, grad_norm, tokens, own_share, asking, *mtp_losses = values
    return BackwardResult(
        mean_loss,
        grad_norm,
        int(tokens),
        batch.count * batch.tokens.shape[1],
        local_loss=own_share * tokens / max(local_tokens, 1),
        mtp_losses=tuple(mtp_losses),
        stop=asking > 0,
    )


def gradients(
    parts: Parts,
    rows: LocalBatch,
    local_tokens: int,
    max_norm: float,
    before_clip: Callable[[], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The device's part of a step, during which the host never waits for it. The planner traces
    this function.

    Args:
        rows: this rank's part of the global batch.
        local_tokens: how many of its tokens are predicted.
        before_clip: called once the gradients are complete.

    Returns:
        Loss, gradient norm, predicted tokens of the whole batch, and this rank's share of the loss;
        scalars. The loss of each module of multi-token prediction, `[modules]`.
    """
    mesh = parts.mesh
    device = parts.device
    compute = parts.compute
    # All rows are copied at once, because each copy from pageable memory may wait.
    rows = rows.to(device)
    # Not copied from the host, which would wait for the device.
    totals = torch.full((), local_tokens, device=device)
    mtp = compute.loss.mtp
    if mtp is not None:
        further = (rows.labels[..., 1:] != IGNORE_INDEX).sum(dim=(0, 1))
        totals = torch.cat([totals[None], further])
    totals = all_reduce(totals, mesh.batch_group).clamp(min=1)
    loss = torch.zeros((), device=device)
    batches = rows.split(compute.batch_size)
    for i, part in enumerate(batches, 1):
        note(f"running forward and backward of batch {i} of {len(batches)}")
        loss += compute.forward_backward(part, totals, last=i == len(batches))
    if before_clip is not None:
        before_clip()
    norm = _grad_norm(parts, max_norm)
    own = loss.clone()
    if mtp is None:
        all_reduce(loss, mesh.loss_group)
        return loss, norm, totals, own, loss.new_zeros(0)
    losses = all_reduce(torch.cat([loss[None], mtp.take()]), mesh.loss_group)
    return losses[0], norm, totals[0], own, losses[1:]


def _grad_norm(parts: Parts, max_norm: float) -> Tensor:
    """The norm of all gradients before they are clipped to at most `max_norm`; 0 only measures
    it.
    """
    pp_group = parts.mesh.group("pp")
    if isinstance(parts.optimizer, OptimizerInBackward):
        return parts.optimizer.norm.take(pp_group, parts.device)
    found = [p.grad for model in parts.models for p in model.parameters() if p.grad is not None]
    norms = SquaredNorm()
    norms.add(found)
    norm = norms.take(pp_group, parts.device)
    if max_norm > 0:
        scale(found, _clip_factor(norm, max_norm))
    return norm


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of this norm, as in `torch.nn.utils.clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def max_over_ranks(value: float, mesh: Mesh, device: torch.device) -> float:
    """The largest of all ranks' values."""
    return all_reduce(
        torch.full((), value, device=device), mesh.loss_group, dist.ReduceOp.MAX
    ).item()
