"""One forward, shared by training and validation, for a whole model and for a pipeline of stages."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.loss import cross_entropy_sum
from torchtitan.distributed.pipeline import Pipeline
from torchtitan.distributed.tensor import loss_context


class Compute:
    """Runs this rank's part of the model on this rank's part of rows of one length.

    Tokens and labels are `[batch, seq]` on the compute device, where seq are the positions this rank holds.
    """

    def __init__(
        self, models: Sequence[FSDPModule], positions: Tensor, pipeline: Pipeline | None, *, sharded_loss: bool
    ):
        """
        Args:
            positions: places in their row of the tokens that this rank sees, on the compute device.
            sharded_loss: the logits are sharded over the vocabulary.
        """
        self.models, self.positions, self.pipeline, self.sharded_loss = models, positions, pipeline, sharded_loss

    def own_part(self, rows: Tensor) -> Tensor:
        """The columns of whole rows `[batch, seq_len]` that this rank holds."""
        return rows if len(self.positions) == rows.shape[1] else rows[:, self.positions.to(rows.device)]

    def forward_backward(self, tokens: Tensor, labels: Tensor, total: Tensor, *, last: bool) -> Tensor:
        """Add the gradients of one batch to the parameters'.

        Args:
            total: what the loss is divided by: predicted tokens of the whole step over all ranks.
            last: reduce the gradients over ranks now; no further batch of this step follows.

        Returns:
            This rank's share of the step's loss, a scalar; 0 where a pipeline's last stage is elsewhere.
        """

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy_sum(logits, labels) / total

        with loss_context(self.sharded_loss):
            if self.pipeline is not None:
                return self.pipeline.forward_backward(tokens, labels, loss)
            (model,) = self.models
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            value = loss(model(tokens, self.positions), labels)
            value.backward()
            return value.detach()

    @torch.no_grad()
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of one batch on this rank, without gradients."""
        with loss_context(self.sharded_loss):
            if self.pipeline is not None:
                return self.pipeline.forward(tokens, labels, cross_entropy_sum)
            (model,) = self.models
            return cross_entropy_sum(model(tokens, self.positions), labels)

    def reshard(self) -> None:
        """Free gathered weights. FSDP keeps some after a forward that no backward follows."""
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
