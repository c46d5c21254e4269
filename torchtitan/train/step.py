"""The training step: forward, backward, clip, update.

`train_step` is the whole of it. How the weights change is one of three updates, built once:
`HostUpdate` waits for the loss and the gradient norm and lets a judge decide; `DeviceUpdate` lets
the device clip and update ahead of the host; `UpdateInBackward` belongs to an optimizer that has
updated each weight when the backward ends (`optimizer.early_step_in_backward`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.converters import FLOAT8, uses
from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepBatch
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.optim.optimizer import OptimizerInBackward, ShardedAdam
from torchtitan.parallel.collectives import AnyRank, SquaredNorm, all_reduce, scale
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.precision.dense import refresh_scales
from torchtitan.train.forward import LocalBatch
from torchtitan.train.state import Components
from torchtitan.utils.activity import note
from torchtitan.utils.device import device_syncs


@dataclass(frozen=True)
class BackwardResult:
    """Outcome of a forward and backward, over all ranks."""

    loss: float
    grad_norm: float
    tokens: int
    """Tokens with a label."""
    read: int
    """Tokens of the batch, with a label or not."""
    local_loss: float
    """Mean loss of this rank's own tokens; 0 where a pipeline's last stage is elsewhere."""
    mtp_losses: tuple[float, ...]
    """Loss of each module of multi-token prediction."""
    stop: bool
    """Some rank had been asked to stop when the step began."""


@dataclass(frozen=True)
class StepResult(BackwardResult):
    """Outcome of a step."""

    learning_rate: float
    updated: bool
    """The weights were updated."""


def is_finite(loss: float, grad_norm: float) -> bool:
    return math.isfinite(loss) and math.isfinite(grad_norm)


def train_step(
    components: Components,
    batch: StepBatch,
    config: Config,
    *,
    update: "Update | None" = None,
    stop: bool = False,
    approve: Callable[[float, float], bool] = is_finite,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Train on one global batch.

    Args:
        update: how the weights change, from `build_update`, which is called if there is none.
        stop: as in `forward_backward`.
        approve: whether to update the weights, given the loss and the gradient norm.
        before_update: called before any weight changes, with complete gradients that are not yet
            clipped; before the backward if that updates the weights.
    """
    update = update or build_update(components, config)
    components.enter(batch.stage)
    learning_rate = components.schedule.apply(batch.stage)
    result = forward_backward(components, batch, update, stop=stop, before_update=before_update)
    approved = approve(result.loss, result.grad_norm)
    update.finish(approved)
    if approved:
        prepare_weights(components, config)
    components.optimizer.zero_grad(set_to_none=True)
    return StepResult(**vars(result), learning_rate=learning_rate, updated=approved)


def prepare_weights(components: Components, config: Config) -> None:
    """Compute what depends on the weights alone and is needed before the next forward."""
    if (
        uses(config, FLOAT8)
        and config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
    ):
        refresh_scales(components.models)


# ---- the update


class Update:
    """How a step changes the weights. Its methods are called in this order, after the backward."""

    in_backward = False
    """The backward has changed them."""

    def __init__(self, components: Components, max_norm: float, *, agree: bool = False):
        """
        Args:
            max_norm: clip gradients to this norm; 0: don't.
            agree: make loss and gradient norm bit-identical on all ranks, because a policy judges
                them.
        """
        self.components = components
        self.max_norm = max_norm
        self.agree = agree

    def clip(self) -> Tensor:
        """The norm of the gradients, which may be clipped here."""
        return _norm(self.components, _gradients(self.components))

    def on_device(self, loss: Tensor, norm: Tensor) -> None:
        """What the device does before the host has read loss and gradient norm."""

    def finish(self, approved: bool) -> None:
        """What follows from the host's judgement."""


class HostUpdate(Update):
    """Updates the weights after the host has judged loss and gradient norm."""

    def clip(self) -> Tensor:
        gradients = _gradients(self.components)
        norm = _norm(self.components, gradients)
        if self.max_norm > 0:
            scale(gradients, _clip_factor(norm, self.max_norm))
        return norm

    def finish(self, approved: bool) -> None:
        note("updating the weights")
        if approved:
            self.components.optimizer.step()
        rejected = torch.ones((), dtype=torch.bool, device=self.components.device)
        _end_step(self.components, None if approved else rejected)


class DeviceUpdate(Update):
    """Clips and updates on the device, before the host knows whether loss and norm are finite. If
    they aren't, nothing changes.
    """

    def on_device(self, loss: Tensor, norm: Tensor) -> None:
        note("updating the weights")
        optimizer = self.components.optimizer
        assert isinstance(optimizer, ShardedAdam)
        divisor = 1 / _clip_factor(norm, self.max_norm) if self.max_norm > 0 else None
        skip = ~torch.isfinite(loss + norm)
        optimizer.step(divisor=divisor, skip=skip)
        _end_step(self.components, skip)


class UpdateInBackward(HostUpdate):
    """Goes with `OptimizerInBackward`, which frees each gradient once it has updated its weight."""

    in_backward = True

    def clip(self) -> Tensor:
        """The norm of the gradients, which are gone and were not clipped."""
        optimizer = self.components.optimizer
        assert isinstance(optimizer, OptimizerInBackward)
        return optimizer.norm.take(self.components.mesh.group("pp"), self.components.device)


def build_update(components: Components, config: Config, *, agree: bool = False) -> Update:
    """How the weights of a run change.

    Args:
        agree: as for `Update`. A policy must know loss and norm before the weights change.
    """
    optimizer = components.optimizer
    max_norm = config.training.max_norm
    if isinstance(optimizer, OptimizerInBackward):
        return UpdateInBackward(components, max_norm, agree=agree)
    can_skip = isinstance(optimizer, ShardedAdam) and optimizer.clips
    if can_skip and not agree and not config.training.enable_cpu_offload:
        return DeviceUpdate(components, max_norm)
    return HostUpdate(components, max_norm, agree=agree)


def _end_step(components: Components, skip: Tensor | None) -> None:
    """Update what follows from a step besides the optimizer, unless `skip` is true."""
    for follower in (components.experts, components.qk_clip):
        if follower is not None:
            follower.step(skip)


def _gradients(components: Components) -> list[Tensor]:
    return [p.grad for model in components.models for p in model.parameters() if p.grad is not None]


def _norm(components: Components, gradients: list[Tensor]) -> Tensor:
    """The norm of the gradients of the whole model."""
    norms = SquaredNorm()
    norms.add(gradients)
    return norms.take(components.mesh.group("pp"), components.device)


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of this norm, as in `torch.nn.utils.clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


# ---- forward and backward


def forward_backward(
    components: Components,
    batch: StepBatch,
    update: Update,
    *,
    stop: bool = False,
    before_update: Callable[[], None] = lambda: None,
) -> BackwardResult:
    """Compute the gradients of one global batch and clip them.

    The loss of every microbatch is divided by the token count of the whole global batch, and
    gradients are summed over ranks. So accumulation, the number of ranks and padding don't change
    the result.

    Args:
        stop: this rank was asked to stop. All ranks learn about it here, and so act after the same
            step.
        before_update: as in `train_step`.
    """
    asked = AnyRank(stop, components.device)
    rows = components.compute.local_rows(batch.tokens, batch.labels, batch.sources, batch.continues)
    local_tokens = int((rows.next_labels != IGNORE_INDEX).sum())
    outcome = device_step(components, rows, local_tokens, update, before_update=before_update)
    update.on_device(outcome.loss, outcome.norm)
    # One read-back for all: on CUDA this is the step's only wait for the device.
    with device_syncs(report=False):
        judged = torch.stack([x.double() for x in (outcome.loss, outcome.norm)])
        if update.agree:
            judged = all_reduce(judged, dist.group.WORLD) / dist.get_world_size()
        others = [x.double() for x in (outcome.tokens, outcome.local_loss, asked.answer())]
        values = torch.cat([judged, torch.stack(others), outcome.mtp_losses.double()]).tolist()
    loss, grad_norm, tokens, local_loss, asking, *mtp_losses = values
    return BackwardResult(
        loss=loss,
        grad_norm=grad_norm,
        tokens=int(tokens),
        read=batch.count * batch.tokens.shape[1],
        local_loss=local_loss * tokens / max(local_tokens, 1),
        mtp_losses=tuple(mtp_losses),
        stop=asking > 0,
    )


class DeviceOutcome(NamedTuple):
    """A forward and backward over all ranks, on the device: scalars, but for the last."""

    loss: Tensor
    norm: Tensor
    tokens: Tensor
    """Tokens with a label in the whole batch."""
    local_loss: Tensor
    """This rank's share of the loss."""
    mtp_losses: Tensor
    """Loss of each module of multi-token prediction, `[modules]`."""


def device_step(
    components: Components,
    rows: LocalBatch,
    local_tokens: int,
    update: Update,
    *,
    before_update: Callable[[], None] = lambda: None,
) -> DeviceOutcome:
    """The device's part of a step, during which the host never waits for it. The planner traces
    this function.

    Args:
        rows: this rank's part of the global batch.
        local_tokens: how many of its tokens have a label.
        before_update: as in `train_step`.
    """
    mesh = components.mesh
    device = components.device
    compute = components.compute
    if update.in_backward:
        before_update()
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
    for i, batch in enumerate(batches, 1):
        note(f"running forward and backward of batch {i} of {len(batches)}")
        loss += compute.forward_backward(batch, totals, last=i == len(batches))
    if not update.in_backward:
        before_update()
    norm = update.clip()
    local_loss = loss.clone()
    if mtp is None:
        all_reduce(loss, mesh.loss_group)
        return DeviceOutcome(loss, norm, totals, local_loss, mtp_losses=loss.new_zeros(0))
    losses = all_reduce(torch.cat([loss[None], mtp.take()]), mesh.loss_group)
    return DeviceOutcome(losses[0], norm, totals[0], local_loss, mtp_losses=losses[1:])


def max_over_ranks(value: float, mesh: Mesh, device: torch.device) -> float:
    """The largest of all ranks' values."""
    return all_reduce(
        torch.full((), value, device=device), mesh.loss_group, dist.ReduceOp.MAX
    ).item()
