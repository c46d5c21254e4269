"""Pipeline parallelism on `torch.distributed.pipelining`: a rank's stages and their schedules.

All schedules use one runtime of torch's: a schedule is an order of computations, to which the
runtime adds communication and FSDP's all-gathers. 1F1B (Narayanan et al., arXiv:2104.04473) is
defined here, because torch's class for it has a separate runtime that can't evaluate.
`config/pipeline_schedules.py` has the table of all schedules; rules and planner also read it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from torchtitan.config.pipeline_schedules import SCHEDULES
from torchtitan.models.attention.interface import Mask
from torchtitan.models.protocols import Model
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.parallel.pipeline.stage import Masks, Sends, Stage, send_through

Loss = Callable[[Tensor, Tensor, int], Tensor]
"""A microbatch's share of the loss, from the output of the last stage, the labels
`[microbatch, seq]`, and the index of its first row in the batch.
"""

_IN_FORWARD = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""The computations, by torch's names, that a forward without a backward needs."""


def stage_modules(stages: PipelinePlan | None, rank: int) -> list[tuple[str, ...] | None]:
    """Names of the modules on each stage of a rank; `[None]`, all modules, without a pipeline."""
    if stages is None:
        return [None]
    return [stages.modules[index] for index in stages.stages_of(rank)]


def keep_modules(model: Model, names: Sequence[str] | None) -> None:
    """Reduce `model`, on the meta device, to the named modules. Layers keep their names.

    Args:
        names: from `stage_modules`; None keeps all.
    """
    if names is None:
        return
    for index in list(model.layers):
        if f"layers.{index}" not in names:
            del model.layers[index]
    for name, _ in list(model.named_children()):
        if name != "layers" and name not in names:
            setattr(model, name, None)


@dataclass(frozen=True)
class StageShapes:
    """Shapes of the inputs and outputs of pipeline stages, for one batch.

    A stage receives and returns hidden states `[microbatch, seq / tp_degree, dim]`. The first stage
    receives tokens `[microbatch, seq]`. The last returns logits `[microbatch, seq, vocab]`, if it
    projects.
    """

    rows: int
    """Number of rows in a batch."""
    seq_len: int
    """Number of tokens of a row that this rank holds, after context parallelism."""
    dim: int
    vocab_size: int
    tp_degree: int
    """Number of ranks that share the sequence of the hidden states."""
    dtype: torch.dtype
    """The dtype of hidden states and logits."""
    project: bool
    """The last stage returns logits rather than hidden states."""
    mtp_modules: int = 0
    """Number of modules of multi-token prediction. With n of them, the embeddings of further tokens
    travel with the hidden states: stages exchange `[microbatch, seq / tp_degree, (1 + n) * dim]`,
    and tokens are `[microbatch, seq, 1 + n]`.
    """

    def ends(self, microbatch_size: int, *, first: bool, last: bool) -> dict[str, Tensor]:
        """A stage's input and output, on the meta device."""
        width = (1 + self.mtp_modules) * self.dim
        hidden_shape = (microbatch_size, self.seq_len // self.tp_degree, width)
        tokens_shape = (
            microbatch_size,
            self.seq_len,
            *([1 + self.mtp_modules] if self.mtp_modules else []),
        )
        logits_shape = (microbatch_size, self.seq_len, self.vocab_size)
        with torch.device("meta"):
            tokens = torch.empty(tokens_shape, dtype=torch.int64)
            hidden = torch.empty(hidden_shape, dtype=self.dtype, requires_grad=True)
            logits = torch.empty(logits_shape, dtype=self.dtype, requires_grad=True)
        return {
            "input_args": tokens if first else hidden,
            "output_args": logits if last and self.project else hidden,
        }


class Pipeline:
    """This rank's stages and their schedules, for batches of one shape.

    All shapes are known in advance, so no forward runs just to infer them.
    """

    def __init__(
        self,
        models: Sequence[FSDPModule],
        stages: PipelinePlan,
        shapes: StageShapes,
        positions: Tensor,
        mask_of: Callable[[Tensor], Mask],
        group: dist.ProcessGroup,
    ):
        """
        Args:
            models: this rank's stages, in order.
            positions: `[seq]`, positions of this rank's tokens in their row, on the compute device.
            mask_of: makes the mask of a microbatch's documents.
        """
        self.models = models
        self.stages = stages
        self.shapes = shapes
        self.positions = positions
        self.mask_of = mask_of
        self.group = group
        self.microbatches = shapes.rows // stages.microbatch_size
        self.local_stages = stages.stages_of(group.rank())
        self._sends = Sends()

    def run(
        self,
        tokens: Tensor,
        labels: Tensor,
        documents: Tensor | None,
        loss: Loss,
        token_weights: Tensor | None = None,
        *,
        backward: bool,
    ) -> Tensor:
        """Run the microbatches of one batch.

        This is torch's `schedule.step`, except that microbatches are split here, so a microbatch's
        target can be more than a tensor: the loss function, the labels, and the index of their
        first row in the batch.

        Args:
            tokens, labels: `[batch, seq]`, or `[batch, seq, 1 + mtp_modules]`.
            documents: `[batch, whole row]`, the document of each token, on the host; None:
                attention sees whole rows.
            token_weights: shaped like `tokens`, for a mixture of experts.
            backward: add the gradients to the parameters'.

        Returns:
            The summed loss of the microbatches, a scalar; 0 except on the rank of the last stage.
        """
        schedule = self._training if backward else self._forward_only
        size = self.stages.microbatch_size
        masks = None
        if documents is not None:
            rows = documents.split(size)
            users = sum(len(model.layers) > 0 for model in self.models)
            masks = Masks(lambda microbatch: self.mask_of(rows[microbatch]), users=users)
        weights = None if token_weights is None else token_weights.split(size)
        for stage in schedule._stages:
            stage.has_backward = schedule._has_backward
            stage.masks = masks if len(stage.submod.layers) else None
            stage.token_weights = weights
        inputs = None
        targets = None
        losses: list[Tensor] | None = None
        if 0 in self.local_stages:
            inputs = [(microbatch,) for microbatch in tokens.split(size)]
        if len(self.stages.modules) - 1 in self.local_stages:
            targets = [
                (loss, microbatch, i * size) for i, microbatch in enumerate(labels.split(size))
            ]
            losses = []
        schedule._step_microbatches(inputs, None, targets, losses, return_outputs=False)
        self._sends.end()
        for stage in schedule._stages:
            stage.clear_runtime_states()
        if not losses:
            return torch.zeros((), device=self.positions.device)
        return torch.stack([x.detach() for x in losses]).sum()

    def _make_stages(self) -> list[Stage]:
        """Stages for one schedule, which are prepared with or without a backward."""
        stages = []
        count = len(self.stages.modules)
        for index, model in zip(self.local_stages, self.models, strict=True):
            ends = self.shapes.ends(
                self.stages.microbatch_size, first=index == 0, last=index == count - 1
            )
            stage = Stage(model, index, count, self.positions.device, **ends, group=self.group)
            stage.positions = self.positions
            stage.project = self.shapes.project
            stage.sends = self._sends
            stages.append(stage)
        return stages

    @cached_property
    def _training(self) -> _PipelineScheduleRuntime:
        schedule = build_schedule(
            self.stages.schedule,
            self.stages.csv_file,
            self._make_stages(),
            self.microbatches,
            loss_fn=_target_loss,
        )
        send_through(schedule, self._sends)
        return schedule

    @cached_property
    def _forward_only(self) -> _PipelineScheduleRuntime:
        """Runs the forwards of all microbatches, stage by stage.

        torch's `eval` of a training schedule fails for V shapes and divides existing gradients.
        """
        schedule = _runtime(self._make_stages(), self.microbatches, loss_fn=_target_loss)
        orders = {}
        for rank in range(self.group.size()):
            stages = self.stages.stages_of(rank)
            order = []
            for stage in stages:
                order += _passes(stage, _ComputationType.FORWARD, self.microbatches)
            # torch only accepts complete orders; the backwards are removed below.
            for stage in reversed(stages):
                order += _passes(stage, _ComputationType.FULL_BACKWARD, self.microbatches)
            orders[rank] = order
        schedule._prepare_schedule_with_comms(orders)
        schedule.pipeline_order_with_comms = {
            rank: [action for action in order if action.computation_type.name in _IN_FORWARD]
            for rank, order in schedule.pipeline_order_with_comms.items()
        }
        schedule._has_backward = False
        send_through(schedule, self._sends)
        return schedule


_runtime = partial(_PipelineScheduleRuntime, scale_grads=False)


def build_schedule(
    name: str | None, csv_file: str | None, stages: Sequence[Any], microbatches: int, **options: Any
) -> _PipelineScheduleRuntime:
    """Build the schedule of this name, or from this file, with its communication.

    Args:
        name: in `config.pipeline_schedules.SCHEDULES`.
        csv_file: checked by `pipeline_schedules.schedule_file`.
        stages: this rank's stages, for torch's schedules.
        options: further arguments for torch's schedule.
    """
    if name is not None and (torch_class := SCHEDULES[name].torch_class):
        schedule_class = getattr(schedules, torch_class)
        return schedule_class(stages, microbatches, scale_grads=False, **options)
    schedule = _runtime(stages, microbatches, **options)
    if name is None:
        schedule._load_csv(csv_file)
        return schedule
    ranks = stages[0].group_size
    orders = {rank: one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)}
    schedule._prepare_schedule_with_comms(orders)
    return schedule


def _target_loss(output: Tensor, target: tuple[Loss, Tensor, int]) -> Tensor:
    loss, labels, first = target
    return loss(output, labels, first)


def _passes(stage: int, kind: _ComputationType, microbatches: int) -> list[_Action]:
    return [_Action(stage, kind, microbatch) for microbatch in range(microbatches)]


def one_forward_one_backward(rank: int, degree: int, microbatches: int) -> list[_Action | None]:
    """1F1B on a rank with one stage: forwards until the first gradient can arrive, then in turn."""
    ahead = min(microbatches, degree - rank)
    forwards = _passes(rank, _ComputationType.FORWARD, microbatches)
    backwards = _passes(rank, _ComputationType.FULL_BACKWARD, microbatches)
    order: list[_Action | None] = [*forwards[:ahead]]
    for i, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + i : ahead + i + 1]]
    return order
