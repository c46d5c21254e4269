"""One forward, shared by training and validation, for a whole model and for a pipeline of stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan.optim.loss import LossSum, chunked_loss_sum
from torchtitan.parallel.pipeline import Pipeline
from torchtitan.parallel.tensor import loss_context


@dataclass(frozen=True)
class LocalBatch:
    """What a rank computes on."""

    tokens: Tensor
    """`[batch, seq]`, where seq are the positions that this rank holds."""
    labels: Tensor
    """`[batch, seq]`."""
    documents: Tensor | None
    """`[batch, whole row]`, the document of each token, where attention stays within documents."""

    def split(self, size: int) -> list["LocalBatch"]:
        """Batches of `size` rows."""
        tokens, labels = self.tokens.split(size), self.labels.split(size)
        documents = [None] * len(tokens) if self.documents is None else self.documents.split(size)
        return [LocalBatch(*part) for part in zip(tokens, labels, documents, strict=True)]

    def to(self, device: torch.device) -> "LocalBatch":
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        return LocalBatch(
            self.tokens.to(device, non_blocking=True), self.labels.to(device, non_blocking=True), documents
        )


class Compute:
    """Runs this rank's part of the model on this rank's part of rows of one length."""

    def __init__(
        self,
        models: Sequence[FSDPModule],
        positions: Tensor,
        pipeline: Pipeline | None,
        loss: LossSum,
        *,
        loss_chunks: int,
        tp_degree: int,
        sharded_loss: bool,
        document_end: int | None,
    ):
        """
        Args:
            positions: places in their row of the tokens that this rank sees, on the compute device.
            loss_chunks: slices of the sequence that are projected to logits, and lose them, one after the other.
            tp_degree: ranks over which the sequence of the final hidden states is sharded.
            sharded_loss: the logits are sharded over the vocabulary.
            document_end: the token that ends a document, if attention is to stay within documents.
        """
        self.models, self.positions, self.pipeline = models, positions, pipeline
        self._loss_sum, self.loss_chunks, self.tp_degree = loss, loss_chunks, tp_degree
        self._columns = positions.cpu()  # the loader's rows are on the host
        self.sharded_loss, self.document_end = sharded_loss, document_end

    def own_rows(self, tokens: Tensor, labels: Tensor) -> LocalBatch:
        """This rank's part of whole rows `[batch, seq_len]`."""
        documents = None
        if self.document_end is not None:
            ends = (tokens == self.document_end).long()
            documents = ends.cumsum(1) - ends  # the token that ends a document belongs to it
        return LocalBatch(self.own_part(tokens), self.own_part(labels), documents)

    def own_part(self, rows: Tensor) -> Tensor:
        """The columns of whole rows that this rank holds."""
        return rows if len(self._columns) == rows.shape[1] else rows[:, self._columns]

    def forward_backward(self, rows: LocalBatch, total: Tensor, *, last: bool) -> Tensor:
        """Add the gradients of one batch, on the compute device, to the parameters'.

        Args:
            total: what the loss is divided by: predicted tokens of the whole step over all ranks.
            last: reduce the gradients over ranks now; no further batch of this step follows.

        Returns:
            This rank's share of the step's loss, a scalar; 0 where a pipeline's last stage is elsewhere.
        """

        def loss(output: Tensor, labels: Tensor) -> Tensor:
            return self._loss(output, labels) / total

        with loss_context(self.sharded_loss):
            if self.pipeline is not None:
                return self.pipeline.forward_backward(rows.tokens, rows.labels, rows.documents, loss)
            (model,) = self.models
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            value = loss(self._run(model, rows), rows.labels)
            value.backward()
            return value.detach()

    @torch.no_grad()
    def forward(self, rows: LocalBatch) -> Tensor:
        """The summed loss of one batch on this rank, without gradients."""
        with loss_context(self.sharded_loss):
            if self.pipeline is not None:
                return self.pipeline.forward(rows.tokens, rows.labels, rows.documents, self._loss)
            (model,) = self.models
            return self._loss(self._run(model, rows), rows.labels)

    def _run(self, model: FSDPModule, rows: LocalBatch) -> Tensor:
        return model(rows.tokens, self.positions, rows.documents, project=self.loss_chunks == 1)

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Summed loss of the last module's output: logits, or hidden states if the loss is chunked."""
        if self.loss_chunks == 1:
            return self._loss_sum(output, labels)
        model: Any = self.models[-1]
        return chunked_loss_sum(
            output,
            model.output_weight,
            labels,
            project=model.project,
            loss=self._loss_sum,
            chunks=self.loss_chunks,
            tp_degree=self.tp_degree,
        )

    def reshard(self) -> None:
        """Free gathered weights. FSDP keeps some after a forward that no backward follows."""
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
