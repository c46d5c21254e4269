"""The training step: forward, backward, clip, update.

`train_step` is the whole step. An `Update` clips the gradients and changes the weights; a run has
one of three kinds. `HostUpdate` waits until the host has read the loss and the gradient norm, and
approved them. `DeviceUpdate` clips and updates on the device without waiting for the host, which
queues the next step before it reads the loss. `UpdateInBackward` is for an optimizer that updates
each weight during the backward (`optimizer.early_step_in_backward`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.converters import FLOAT8, uses
from torchtitan.data.loader import StepBatch
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.optim.optimizer import OptimizerInBackward, ShardedAdam
from torchtitan.parallel.collectives import AnyRank, SquaredNorm, all_reduce, scale
from torchtitan.parallel.precision.dense import refresh_scales
from torchtitan.train.engine import Engine
from torchtitan.train.forward import LocalBatch
from torchtitan.train.state import Approve, StepResult, is_finite
from torchtitan.utils.activity import note
from torchtitan.utils.device import LateValues


def train_step(
    engine: Engine,
    batch: StepBatch,
    *,
    update: "Update | None" = None,
    stop: bool = False,
    approve: Approve = is_finite,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Train on one global batch.

    Args:
        update: from `build_update`; None: build it now.
        stop: whether this rank was asked to stop.
        approve: called even without a loss, but then nothing is updated. With `DeviceUpdate`, the
            result's `judge` calls it, and must get the answer of `is_finite`.
        before_update: called once the gradients are complete, before they are clipped and any
            weight changes; or before the backward, if the backward updates the weights.
    """
    update = update or build_update(engine)
    engine.enter_stage(batch.stage)
    learning_rate = engine.schedule.apply(batch.stage)
    result = forward_backward(engine, batch, update, stop=stop, before_update=before_update)
    result.learning_rate = learning_rate
    result.approve = approve
    update.finish(result)
    prepare_weights(engine)
    engine.optimizer.zero_grad(set_to_none=True)
    return result


def prepare_weights(engine: Engine) -> None:
    """Recompute what depends only on the weights and the next forward needs: Float8 scales."""
    config = engine.config
    if (
        uses(config, FLOAT8)
        and config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
    ):
        refresh_scales(engine.models)


# ---- the update


class Update:
    """Clips the gradients and updates the weights.

    A step calls the methods in this order, after the backward: `clip`, `queue_update`, `finish`.
    """

    in_backward = False
    """Whether the backward itself updates the weights."""

    def __init__(self, engine: Engine, max_norm: float, *, agree: bool = False):
        """
        Args:
            max_norm: clip gradients to this norm; 0: don't.
            agree: make loss and gradient norm bit-identical on all ranks, because a policy on each
                rank decides by them.
        """
        self.engine = engine
        self.max_norm = max_norm
        self.agree = agree
        # Listed once: walking all modules in every step is slow, mostly for small models.
        self._parameters = [p for model in engine.models for p in model.parameters()]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def clip(self) -> Tensor:
        """Compute the norm of the gradients. `HostUpdate` also clips them here."""
        return _norm(self.engine, self._gradients())

    def queue_update(self, loss: Tensor, norm: Tensor, tokens: Tensor) -> None:
        """Queue the update on the device before the host reads loss and norm: `DeviceUpdate` only.

        Args:
            tokens: number of tokens with a label in the global batch; without any, nothing changes.
        """

    def expect(self, any_label: AnyRank) -> None:
        """Prepare for the backward of a batch: `UpdateInBackward` only.

        Args:
            any_label: whether any token of the global batch has a label.
        """

    def finish(self, result: StepResult) -> None:
        """Finish the update; all but `DeviceUpdate` judge the result first."""


class HostUpdate(Update):
    """Updates the weights after the host has approved loss and gradient norm."""

    def clip(self) -> Tensor:
        gradients = self._gradients()
        norm = _norm(self.engine, gradients)
        if self.max_norm > 0:
            scale(gradients, _clip_factor(norm, self.max_norm))
        return norm

    def finish(self, result: StepResult) -> None:
        result.judge()
        note("updating the weights")
        if result.updated:
            self.engine.optimizer.step()
        _end_step(self.engine, torch.full((), not result.updated, device=self.engine.device))


class DeviceUpdate(Update):
    """Clips and updates on the device, before the host has read loss and norm. If they are not
    finite, or no token has a label, the device skips the update.
    """

    def queue_update(self, loss: Tensor, norm: Tensor, tokens: Tensor) -> None:
        note("updating the weights")
        optimizer = self.engine.optimizer
        assert isinstance(optimizer, ShardedAdam)
        divisor = 1 / _clip_factor(norm, self.max_norm) if self.max_norm > 0 else None
        skip = ~torch.isfinite(loss + norm) | (tokens == 0)
        optimizer.step(divisor=divisor, skip=skip)
        _end_step(self.engine, skip)


class UpdateInBackward(HostUpdate):
    """The update of `OptimizerInBackward`, which frees each gradient after updating its weight."""

    in_backward = True

    def expect(self, any_label: AnyRank) -> None:
        """Pause the updates of a batch without labels. The host must wait for the device here,
        because the backward updates the weights.
        """
        optimizer = self.engine.optimizer
        assert isinstance(optimizer, OptimizerInBackward)
        optimizer.paused = not any_label.answer()

    def clip(self) -> Tensor:
        """The norm of the gradients, which were not clipped and are already freed."""
        optimizer = self.engine.optimizer
        assert isinstance(optimizer, OptimizerInBackward)
        return optimizer.norm.take(self.engine.mesh.group("pp"), self.engine.device)


def build_update(engine: Engine, *, agree: bool = False) -> Update:
    """Build the kind of update that the run's optimizer needs.

    Args:
        agree: as for `Update`. A policy reads loss and norm before the weights change, which
            excludes `DeviceUpdate`.
    """
    optimizer = engine.optimizer
    training = engine.config.training
    can_skip = isinstance(optimizer, ShardedAdam) and optimizer.clips
    kind: type[Update] = HostUpdate
    if isinstance(optimizer, OptimizerInBackward):
        kind = UpdateInBackward
    elif can_skip and not agree and not training.enable_cpu_offload:
        kind = DeviceUpdate
    return kind(engine, training.max_norm, agree=agree)


def _end_step(engine: Engine, skip: Tensor) -> None:
    """Update the experts' routing biases and clip queries and keys, unless `skip` is true."""
    for component in (engine.experts, engine.qk_clip):
        if component is not None:
            component.step(skip)


def _norm(engine: Engine, gradients: list[Tensor]) -> Tensor:
    """The norm of the gradients of the whole model."""
    norms = SquaredNorm()
    norms.add(gradients)
    return norms.take(engine.mesh.group("pp"), engine.device)


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of this norm, as in `torch.nn.utils.clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


# ---- forward and backward


def forward_backward(
    engine: Engine,
    batch: StepBatch,
    update: Update,
    *,
    stop: bool = False,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Compute the gradients of one global batch and clip them.

    The loss of every microbatch is divided by the token count of the whole global batch, and
    gradients are summed over ranks. So accumulation, the number of ranks and padding don't change
    the result.

    Args:
        stop: whether this rank was asked to stop. Ranks exchange it here, so all of them stop
            after the same step.
        before_update: as for `train_step`.
    """
    any_stop = AnyRank(stop, engine.device)
    rows = engine.compute.local_rows(batch.tokens, batch.labels, batch.sources, batch.continues)
    local_tokens = int((rows.next_labels != IGNORE_INDEX).sum())
    if update.in_backward:
        update.expect(AnyRank(local_tokens > 0, engine.device))
    outcome = device_step(engine, rows, local_tokens, update, before_update=before_update)
    update.queue_update(outcome.loss, outcome.norm, outcome.tokens)
    values = torch.cat([value.double().flatten() for value in outcome])
    if update.agree:
        all_reduce(values[:2], dist.group.WORLD).div_(dist.get_world_size())
    note("waiting for the device")
    return StepResult(
        LateValues(values),
        local_tokens,
        read=batch.count * batch.tokens.shape[1],
        stop=any_stop.answer(),  # once all devices have begun the step
    )


class DeviceOutcome(NamedTuple):
    """Outcome of a forward and backward over all ranks, as tensors on the device."""

    loss: Tensor
    norm: Tensor
    tokens: Tensor
    """Number of tokens with a label in the global batch."""
    local_loss: Tensor
    """This rank's share of the loss."""
    mtp_losses: Tensor
    """Loss of each module of multi-token prediction, `[modules]`."""


def device_step(
    engine: Engine,
    rows: LocalBatch,
    local_tokens: int,
    update: Update,
    *,
    before_update: Callable[[], None] = lambda: None,
) -> DeviceOutcome:
    """Forward, backward and clipping, during which the host never waits for the device.

    A test traces this function to check the planner.

    Args:
        rows: this rank's rows of the global batch, on the host.
        local_tokens: number of its tokens that have a label.
        before_update: as for `train_step`.
    """
    mesh = engine.mesh
    device = engine.device
    compute = engine.compute
    if update.in_backward:
        before_update()
    # All rows are copied at once, because the host may wait for each copy from pageable memory.
    rows = rows.to(device)
    # `full` fills on the device; a copy from the host would wait for it.
    totals = torch.full((), local_tokens, device=device)
    mtp = compute.loss.mtp
    if mtp is not None:
        mtp_tokens = (rows.labels[..., 1:] != IGNORE_INDEX).sum(dim=(0, 1))
        totals = torch.cat([totals[None], mtp_tokens])
    counts = all_reduce(totals, mesh.batch_group)
    totals = counts.clamp(min=1)
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
        return DeviceOutcome(loss, norm, counts, local_loss, mtp_losses=loss.new_zeros(0))
    losses = all_reduce(torch.cat([loss[None], mtp.take()]), mesh.loss_group)
    return DeviceOutcome(losses[0], norm, counts[0], local_loss, mtp_losses=losses[1:])
