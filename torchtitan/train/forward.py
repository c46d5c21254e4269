"""The forward (and backward) that training and validation share, with or without a pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.models.attention.interface import Mask
from torchtitan.optim.loss import RowLoss, SourceTally, chunked_loss
from torchtitan.parallel.pipeline.pipeline import Pipeline
from torchtitan.parallel.tensor.styles import loss_context
from torchtitan.train.mtp_loss import MTPLoss, stack_next_tokens


@dataclass(frozen=True)
class LocalBatch:
    """The part of a batch that one rank computes on."""

    tokens: Tensor
    """`[batch, seq]`, the tokens at the positions that this rank holds. With n modules of
    multi-token prediction `[batch, seq, 1 + n]`: each token with the n tokens after it.
    """
    labels: Tensor
    """Shaped like `tokens`: the token after each of them."""
    documents: Tensor | None
    """`[batch, whole row]`, the document of each token, on the host; None: attention isn't limited
    to documents.
    """
    sources: Tensor | None = None
    """`[batch]`, the data source of each row, by its index in the configuration; None: losses of
    sources aren't recorded.
    """

    @property
    def next_labels(self) -> Tensor:
        """`[batch, seq]`, only the label for the next token."""
        return self.labels if self.labels.dim() == 2 else self.labels[..., 0]

    def split(self, size: int) -> list["LocalBatch"]:
        """Batches of `size` rows."""
        fields = [None if rows is None else rows.split(size) for rows in vars(self).values()]
        count = len(self.tokens.split(size))
        return [
            LocalBatch(*columns)
            for columns in zip(*(columns or [None] * count for columns in fields), strict=True)
        ]

    def pin_memory(self) -> "LocalBatch":
        """The same batch in page-locked memory, from which copies don't make the host wait."""
        return self._copy(Tensor.pin_memory)

    def to(self, device: torch.device) -> "LocalBatch":
        return self._copy(lambda rows: rows.to(device, non_blocking=True))

    def _copy(self, copy: Callable[[Tensor], Tensor]) -> "LocalBatch":
        sources = None if self.sources is None else copy(self.sources)
        return LocalBatch(copy(self.tokens), copy(self.labels), self.documents, sources)


@dataclass(frozen=True)
class ModelLoss:
    """The loss of a model's output, summed over tokens.

    The output is logits; or final hidden states, if the loss is computed in chunks.
    """

    row_loss: RowLoss
    chunks: int
    """Number of slices of the sequence; the logits of only one slice exist at a time."""
    tp_degree: int
    """Number of ranks that share the sequence of the final hidden states."""
    sharded: bool
    """Whether the logits are sharded over the vocabulary."""
    mtp: MTPLoss | None = None
    """The losses of multi-token prediction, if there is any."""

    @property
    def project(self) -> bool:
        """Whether the model returns logits rather than final hidden states."""
        return self.chunks == 1 and self.mtp is None

    def __call__(
        self, model: Any, output: Tensor, labels: Tensor, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the summed loss of `output`, which `model` returned for tokens with `labels`.

        Args:
            model: the whole model, or its last pipeline stage.
            factors: weights of the losses of the next and of further tokens, as for `chunked_loss`.

        Returns:
            The sum, a scalar; and the loss of each row `[batch]`, without a gradient. With
            `factors` as `chunked_loss` returns them.
        """
        if self.project:
            losses = self.row_loss(output, labels)
            return losses.sum(), losses.detach()
        return chunked_loss(
            output,
            model.output_weight,
            labels,
            project=model.project,
            loss=self.row_loss,
            chunks=self.chunks,
            tp_degree=self.tp_degree,
            factors=factors,
        )

    def context(self) -> AbstractContextManager[None]:
        """The context of the loss and its backward."""
        return loss_context(self.sharded)


@dataclass(eq=False)
class Compute:
    """Runs forward and backward of this rank's part of the model, on batches of one shape."""

    models: Sequence[FSDPModule]
    """This rank's pipeline stages; the whole model without a pipeline."""
    positions: Tensor
    """`[seq]`, the positions of this rank's tokens in their row, on the compute device."""
    pipeline: Pipeline | None
    loss: ModelLoss
    expect_backward: Callable[..., None]
    """The function of this name for the run's configuration."""
    batch_size: int
    """Number of rows of a forward and backward."""
    document_end: int | None
    """The token that ends a document, if attention stays within documents."""
    mask_of: Callable[[Tensor], Mask]
    """Makes the mask of `LocalBatch.documents`."""
    pin: bool = False
    """Whether to put batches into page-locked memory."""
    weighs_tokens: bool = False
    """Whether to pass the model the weight of each token in the loss, which a mixture of experts
    needs.
    """
    tally: SourceTally | None = None
    """Adds up the losses of each data source."""

    def __post_init__(self) -> None:
        self._columns = self.positions.cpu()  # the loader's rows are on the host

    def local_rows(
        self,
        tokens: Tensor,
        labels: Tensor,
        sources: Tensor | None = None,
        continues: Tensor | None = None,
    ) -> LocalBatch:
        """Cut the part that this rank computes on out of whole rows.

        Args:
            tokens, labels: `[batch, seq_len]`.
            sources: `[batch]`, the data source of each row.
            continues: `StepBatch.continues`.
        """
        documents = None
        if self.document_end is not None:
            ends = tokens == self.document_end
            if continues is not None:
                ends &= ~continues
            ends = ends.long()
            documents = ends.cumsum(1) - ends  # the token that ends a document belongs to it
        if self.loss.mtp is not None:
            tokens, labels = stack_next_tokens(tokens, labels, documents, self.loss.mtp.modules)
        rows = LocalBatch(
            self.local_columns(tokens),
            self.local_columns(labels),
            documents,
            sources if self.tally else None,
        )
        return rows.pin_memory() if self.pin else rows

    def local_columns(self, rows: Tensor) -> Tensor:
        """The columns of whole rows that this rank holds."""
        return rows if len(self._columns) == rows.shape[1] else rows[:, self._columns]

    def forward_backward(self, rows: LocalBatch, totals: Tensor, *, last: bool) -> Tensor:
        """Add the gradients of one batch, which is on the compute device, to `param.grad`.

        Args:
            totals: number of predicted tokens of the whole step over all ranks, by which losses are
                divided: a scalar, or with multi-token prediction `[1 + n]`, one for each loss.
            last: this is the last batch of the step, after which gradients are summed over ranks.

        Returns:
            This rank's share of the step's loss of the next token, a scalar; 0 if another rank has
            the pipeline's last stage.
        """
        mtp = self.loss.mtp
        total = totals if mtp is None else totals[0]
        factors = None if mtp is None else mtp.factors(totals)

        def local_loss(output: Tensor, labels: Tensor, first: int = 0) -> Tensor:
            loss_sum, row_losses = self.loss(self.models[-1], output, labels, factors)
            if mtp is not None:
                mtp.add(row_losses, totals)
                row_losses = row_losses[:, 0]
                labels = labels[..., 0]
            if self.tally is not None and rows.sources is not None:
                self.tally.add(rows.sources[first : first + len(labels)], row_losses, labels)
            return loss_sum / total

        weights = (rows.labels != IGNORE_INDEX) / totals if self.weighs_tokens else None
        with self.loss.context():
            if self.pipeline is not None:
                return self.pipeline.run(
                    rows.tokens, rows.labels, rows.documents, local_loss, weights, backward=True
                )
            (model,) = self.models
            self.expect_backward(model, last=last)
            value = local_loss(self._run(model, rows, weights), rows.labels)
            value.backward()
            model.copies.take_gradients(last=last)
            return value.detach()

    @torch.no_grad()
    def forward(self, rows: LocalBatch) -> Tensor:
        """The summed loss of one batch on this rank, without gradients."""
        with self.loss.context():
            if self.pipeline is not None:
                return self.pipeline.run(
                    rows.tokens, rows.labels, rows.documents, self._loss_sum, backward=False
                )
            (model,) = self.models
            return self._loss_sum(self._run(model, rows), rows.labels)

    def _run(
        self, model: FSDPModule, rows: LocalBatch, token_weights: Tensor | None = None
    ) -> Tensor:
        mask = None if rows.documents is None else self.mask_of(rows.documents)
        model.copies.insert()
        options = {} if token_weights is None else {"token_weights": token_weights}
        return model(rows.tokens, self.positions, mask, project=self.loss.project, **options)

    def _loss_sum(self, output: Tensor, labels: Tensor, first: int = 0) -> Tensor:
        return self.loss(self.models[-1], output, labels)[0]

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context in which the model evaluates. A forward without a backward leaves gathered and
        copied weights, which a checkpoint must not see.
        """
        for model in self.models:
            model.eval()
        try:
            yield
        finally:
            for model in self.models:
                model.train()
                model.copies.remove()
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
