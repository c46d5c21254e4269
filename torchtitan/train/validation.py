"""Validation: loss and bits per byte on held-out data, computed by the same forward that trains."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.data.loader import StepBatch, StepLoader
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.parallel.collectives import AnyRank, all_reduce
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.forward import Compute
from torchtitan.utils.activity import DATA, note


@dataclass
class ValidationData:
    """The data of one validation set."""

    name: str
    """Empty if there is only one set."""
    loader: StepLoader
    limit: int
    """Largest number of batches per validation; -1: the whole set."""
    batches: int | None = None
    """Number of batches that a validation reads, over all ranks; None before the first pass."""


@dataclass(frozen=True)
class ValidationResult:
    """The result of validating on one set."""

    name: str
    loss: float | None
    """Mean cross-entropy per predicted token, in nats; None if no token is predicted."""
    tokens: int
    """Number of predicted tokens."""
    bytes: int
    """UTF-8 bytes of the text behind the predicted tokens."""

    @property
    def bits_per_byte(self) -> float | None:
        """The loss per byte, comparable between tokenizers: `loss / ln 2 x tokens / bytes`. None
        without text.
        """
        if self.loss is None or not self.bytes:
            return None
        return self.loss / math.log(2) * self.tokens / self.bytes

    def record(self) -> dict[str, Any]:
        """The result as it is logged."""
        return {
            "name": self.name,
            "loss": self.loss,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
        }


@dataclass(eq=False)
class Validator:
    """Validates on several sets. All ranks make the same calls."""

    compute: Compute
    sets: Sequence[ValidationData]
    mesh: Mesh
    device: torch.device
    byte_lengths: Tensor
    """`[vocab]`, UTF-8 bytes of each token, on the device."""

    def __post_init__(self) -> None:
        self.before_batch: Callable[[], object] = lambda: None

    def run(self) -> list[ValidationResult]:
        """Validate on every set."""
        with self.compute.evaluation():
            return [self._validate(data) for data in self.sets]

    @torch.no_grad()
    def _validate(self, data: ValidationData) -> ValidationResult:
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for batch in self._batches(data):
            self.before_batch()
            rows = self.compute.local_rows(
                batch.tokens, batch.labels, continues=batch.continues
            ).to(self.device)
            for microbatch in rows.split(self.compute.batch_size):
                loss += self.compute.forward(microbatch).double()
            counts += self._tokens_and_bytes(rows.labels)
        all_reduce(loss, self.mesh.loss_group)
        all_reduce(counts, self.mesh.batch_group)
        loss_sum, tokens, size = torch.cat([loss[None], counts.double()]).tolist()
        mean = loss_sum / tokens if tokens else None
        return ValidationResult(data.name, mean, int(tokens), int(size))

    def _tokens_and_bytes(self, labels: Tensor) -> Tensor:
        has_label = labels != IGNORE_INDEX
        lengths = self.byte_lengths[labels.masked_fill(~has_label, 0)].masked_fill(~has_label, 0)
        return torch.stack([has_label.sum(), lengths.sum()])

    def _batches(self, data: ValidationData) -> Iterator[StepBatch]:
        """This rank's rows of each batch.

        Ranks may run out of data at different times, but every rank must take part in every
        forward: a rank without data feeds rows without labels. All passes over a set are the same,
        so only in the first one do ranks exchange whether any has data left, for which the host
        waits.
        """
        batches = iter(data.loader)
        name = f"{data.loader.name} for validation"
        for index in itertools.count():
            if index in (data.limit, data.batches):
                break
            note(f"{DATA} from {name}")
            batch = next(batches, None)
            note("validating")
            if data.batches is None and not AnyRank(batch is not None, self.device).answer():
                break
            yield batch or data.loader.blank()
        data.batches = index

    def close(self) -> None:
        """Stop reading ahead."""
        for data in self.sets:
            data.loader.close()
