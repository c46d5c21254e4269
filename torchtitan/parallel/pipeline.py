"""Pipeline parallelism on `torch.distributed.pipelining`: a rank's stages, and the schedules that run them.

Every schedule runs on torch's one schedule runtime, given as an order of computations that the runtime completes with
communication and FSDP's gathering. GPipe is breadth-first with one stage per rank; 1F1B (Narayanan et al.,
arXiv:2104.04473) is written out here, since torch's class for it has a runtime of its own that can't evaluate.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleLoopedBFS,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from torchtitan.config.stages import PipelineStages
from torchtitan.utils.phase import note

Loss = Callable[[Tensor, Tensor], Tensor]
"""What the last stage gives, and the labels of a microbatch, to its loss, to be added up."""

_FORWARD = {
    _ComputationType.FORWARD,
    _ComputationType.SEND_F,
    _ComputationType.RECV_F,
    _ComputationType.UNSHARD,
    _ComputationType.RESHARD,
}


def keep_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Make `model` (on the meta device) the stage that holds the named modules; layers keep their names."""
    for index in list(model.layers):
        if f"layers.{index}" not in names:
            del model.layers[index]
    for name, _ in list(model.named_children()):
        if name != "layers" and name not in names:
            setattr(model, name, None)


class Pipeline:
    """This rank's stages and their schedules, for batches of one shape.

    Shapes: a stage gets and gives `[microbatch, seq, dim]`, sharded over the sequence as context and tensor parallelism
    have it; all shapes are given, so that nothing runs only to find them out.
    """

    def __init__(
        self,
        models: Sequence[FSDPModule],
        plan: PipelineStages,
        group: dist.ProcessGroup,
        device: torch.device,
        rows: int,
        positions: Tensor,
        widths: tuple[int, int],
        tp_degree: int,
        dtype: torch.dtype,
        *,
        project: bool,
    ):
        """
        Args:
            models: modules of this rank's stages, in order of stage.
            rows: of a batch.
            positions: places in their row of the tokens this rank sees.
            widths: of the hidden states between stages, and of the logits.
            tp_degree: ranks over which the sequence of the hidden states is split further.
            dtype: of both.
            project: the last stage gives logits, not hidden states.
        """
        self.models, self.plan, self.group, self.device, self.positions = models, plan, group, device, positions
        self.widths, self.tp_degree, self.dtype, self.project = widths, tp_degree, dtype, project
        self.microbatches = rows // plan.microbatch_size
        self.stages = plan.stages_of(group.rank())
        self.is_first = 0 in self.stages
        self.is_last = len(plan.modules) - 1 in self.stages
        self._loss: Loss

    def forward_backward(self, tokens: Tensor, labels: Tensor, documents: Tensor | None, loss: Loss) -> Tensor:
        """Gradients of one batch; the summed loss of its microbatches on the last stage's rank, elsewhere 0.

        Args:
            documents: `[batch, whole row]`, the document of each token; None: attention sees whole rows.
        """
        self._loss = loss
        return self._run(self._training, self._training.step, tokens, labels, documents)

    @torch.no_grad()
    def forward(self, tokens: Tensor, labels: Tensor, documents: Tensor | None, loss: Loss) -> Tensor:
        """The summed loss of one batch, without gradients."""
        self._loss = loss
        return self._run(self._forward_only, self._forward_only.eval, tokens, labels, documents)

    def _run(
        self,
        schedule: _PipelineScheduleRuntime,
        step: Callable[..., Any],
        tokens: Tensor,
        labels: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        losses: list[Tensor] = []
        for stage in schedule._stages:
            stage.documents = None if documents is None else documents.split(self.plan.microbatch_size)
        target = {"target": labels, "losses": losses} if self.is_last else {}
        step(*((tokens,) if self.is_first else ()), **target, return_outputs=False)
        return torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros((), device=self.device)

    def _loss_of(self, output: Tensor, labels: Tensor) -> Tensor:
        return self._loss(output, labels)

    def _options(self) -> dict[str, Any]:
        """What every schedule is made with: stages of its own, for they keep buffers for what they receive."""
        stages = [self._stage(index, model) for index, model in zip(self.stages, self.models, strict=True)]
        return {
            "stages": stages,
            "n_microbatches": self.microbatches,
            "loss_fn": self._loss_of,
            "scale_grads": False,
        }

    def _stage(self, index: int, model: FSDPModule) -> "_Stage":
        size, seq_len, last = self.plan.microbatch_size, len(self.positions), len(self.plan.modules) - 1
        dim, vocab_size = self.widths
        with torch.device("meta"):
            tokens = torch.empty(size, seq_len, dtype=torch.int64)
            hidden = torch.empty(size, seq_len // self.tp_degree, dim, dtype=self.dtype, requires_grad=True)
            logits = torch.empty(size, seq_len, vocab_size, dtype=self.dtype, requires_grad=True)
        projects = index == last and self.project
        ends = {"input_args": hidden if index else tokens, "output_args": logits if projects else hidden}
        stage = _Stage(model, index, last + 1, self.device, **ends, group=self.group)
        stage.positions, stage.project = self.positions, self.project
        return stage

    @cached_property
    def _training(self) -> _PipelineScheduleRuntime:
        name, options = self.plan.schedule, self._options()
        if self.plan.csv_file:
            schedule = _PipelineScheduleRuntime(**options)
            schedule._load_csv(self.plan.csv_file)
        elif name == "1F1B":
            schedule = _PipelineScheduleRuntime(**options)
            ranks = self.group.size()
            schedule._prepare_schedule_with_comms(
                {rank: one_forward_one_backward(rank, ranks, self.microbatches) for rank in range(ranks)}
            )
        else:
            kind = ScheduleLoopedBFS if name == "GPipe" else get_schedule_class(name)
            schedule = kind(**options)
        return schedule

    @cached_property
    def _forward_only(self) -> _PipelineScheduleRuntime:
        """Every stage runs all its microbatches, the earlier stages first.

        torch's own `eval` of a training schedule fails for V shapes and divides the gradients that are there.
        """
        schedule = _PipelineScheduleRuntime(**self._options())
        orders = {}
        for rank in range(self.group.size()):
            own, microbatches = self.plan.stages_of(rank), range(self.microbatches)
            forwards = [_Action(s, _ComputationType.FORWARD, m) for s in own for m in microbatches]
            # Never run: torch accepts only orders that are complete.
            backwards = [_Action(s, _ComputationType.FULL_BACKWARD, m) for s in own[::-1] for m in microbatches]
            orders[rank] = [*forwards, *backwards]
        schedule._prepare_schedule_with_comms(orders)
        schedule.pipeline_order_with_comms = {
            rank: [action for action in order if action.computation_type in _FORWARD]
            for rank, order in schedule.pipeline_order_with_comms.items()
        }
        return schedule


class _Stage(PipelineStage):
    """Gives its module what every stage needs besides hidden states.

    Not through the schedule: it would cut the positions into microbatches, and torch 2.11 asks for their gradient.
    """

    positions: Tensor
    project: bool
    documents: Sequence[Tensor] | None
    """Of each microbatch."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.microbatch = fwd_chunk_id
        note(f"running stage {self.stage_index}, from the forward of microbatch {fwd_chunk_id}")
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        note(f"running stage {self.stage_index}, from the backward of microbatch {bwd_chunk_id}")
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        documents = None if self.documents is None else self.documents[self.microbatch]
        own = {"positions": self.positions, "documents": documents, "project": self.project}
        return super().forward_maybe_with_nosync(*args, **own, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # A V has two neighbouring stages on its last rank; torch before 2.13 makes gloo connect that rank to itself.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def one_forward_one_backward(rank: int, degree: int, microbatches: int) -> list[_Action | None]:
    """1F1B of one rank, which has one stage: forwards until the first gradient can arrive, then in turns."""
    warmup = min(microbatches, degree - rank)
    forwards = [_Action(rank, _ComputationType.FORWARD, m) for m in range(microbatches)]
    backwards = [_Action(rank, _ComputationType.FULL_BACKWARD, m) for m in range(microbatches)]
    order: list[_Action | None] = [*forwards[:warmup]]
    for i, backward in enumerate(backwards):
        order += [backward, *forwards[warmup + i : warmup + i + 1]]
    return order
