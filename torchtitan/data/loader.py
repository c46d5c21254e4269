"""This rank's batch of every step, read ahead of training.

DataSpec -> open_source -> Source.reader -> RowReader -> StepLoader -> StepBatch
"""

import queue
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.data.read_ahead import ReadAhead
from torchtitan.data.rows import Row, blank_row, skipped_until, split_rows
from torchtitan.data.sources import DataSpec, DocumentSource, open_source
from torchtitan.data.workers import Workers
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.text import plural


@dataclass(frozen=True)
class StepBatch:
    """This rank's part of one step."""

    tokens: Tensor
    """`[rows, seq]` int64."""
    labels: Tensor
    """`[rows, seq]` int64: the next token, or `IGNORE_INDEX`."""
    state: dict[str, Any]
    """This rank's part of the position after the step."""


_KEYS = {
    "contents": "{section}.dataset",
    "tokenizer": "model.hf_assets_path",
    "seed": "debug.seed",
    "rows_per_step": "{section}.global_batch_size",
    "lanes": "{section}.dataset",
}
"""The configuration key behind an entry of a fingerprint, where their names differ."""


def build_loader(
    spec: DataSpec,
    *,
    dp_rank: int = 0,
    dp_degree: int = 1,
    local_batch_size: int = 1,
    limits: tuple[float, float] = (150.0, 50.0),
) -> "StepLoader":
    """Build the loader of a rank; by default, of all rows.

    Args:
        local_batch_size: the rank's number of rows is rounded up to a multiple of it, with rows without labels.
        limits: seconds to wait for the first batch and for each later one, unless `dataloader.timeout_seconds` is set.

    Raises:
        UserError: the data is missing, damaged, empty, or made for another tokenizer.
    """
    rows = split_rows(range(spec.rows_per_step), dp_degree)[dp_rank]
    batches = -(-spec.rows_per_step // (dp_degree * local_batch_size))
    later = spec.options.timeout_seconds or limits[1]
    return StepLoader(spec, rows, batches * local_batch_size, (max(limits[0], later), later))


class StepLoader:
    """Iterates over steps. Training data never ends; a finite pass restarts with every iteration."""

    def __init__(self, spec: DataSpec, rows: range, size: int, limits: tuple[float, float]):
        """
        Args:
            rows: the rows of each step that this rank reads.
            size: number of rows in a batch; rows without labels fill it up.
            limits: seconds to wait for the first batch and for each later one.
        """
        self.spec, self.rows, self.size = spec, rows, size
        self.limit, self.later_limit = limits
        self.name = spec.name
        self.retry = spec.retry()
        self.source = open_source(spec, self.retry)
        self._warn_of_repeats()
        self.fingerprint: dict[str, Any] = {
            "dataset": spec.name,
            "contents": self.source.fingerprint,
            "tokenizer": spec.tokenizer.fingerprint,
            "seq_len": spec.seq_len,
            "seed": spec.seed,
        }
        if self.source.lanes:
            self.fingerprint |= {"rows_per_step": spec.rows_per_step, "lanes": self.source.lanes}
        self.start: dict[str, Any] | None = None
        self._ahead: ReadAhead[StepBatch] | None = None
        self._workers: Workers | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a merged position, on any number of ranks and workers.

        Raises:
            UserError: it is a position in other data.
        """
        saved = state["fingerprint"]
        for name in self.fingerprint | saved:
            old, new = saved.get(name), self.fingerprint.get(name)
            if old != new and name != "dataset":  # files may have moved, if their contents are the same
                key = _KEYS.get(name, "{section}." + name).format(section=self.spec.section)
                raise UserError(
                    f"{key}: the checkpoint's data position is for {name} {old}, but this run has {new}.\n"
                    f'Set {key} back, or restart the data with checkpoint.exclude_from_loading = ["dataloader"].'
                )
        self.start = state
        self._workers = None

    def skipped(self, state: dict[str, Any] | None = None) -> Counter[str]:
        """Bad documents that were left out, by kind.

        Args:
            state: merged position up to which those of a stream are counted.
        """
        if isinstance(self.source, DocumentSource):
            return self.source.documents.skipped
        return skipped_until(state or {})

    def __iter__(self) -> Iterator[StepBatch]:
        """
        Raises:
            UserError: reading fails (a disk or network error, a worker that was killed), or a batch doesn't arrive in
                time; the limits are shorter than those of the other ranks' collectives.
        """
        self.close()
        self._ahead = ahead = ReadAhead(self._batches(), self.spec.options.prefetch_factor or 2)
        while True:
            try:
                batch = ahead.get(self.limit)
            except queue.Empty:
                raise UserError(self._stalled()) from None
            except (OSError, EOFError, RuntimeError) as error:
                message = f"{self.spec.section}.dataset: reading failed: {type(error).__name__}: {error}"
                raise UserError(message) from error
            if batch is None:
                return
            self.limit = self.later_limit
            yield batch

    def close(self) -> None:
        """Stop reading ahead. A later iteration starts again."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._workers is not None and not self.spec.options.persistent_workers:
            self._workers = None

    def _batches(self) -> Iterator[StepBatch]:
        if self.spec.options.num_workers:
            self._workers = self._workers or Workers(self.spec, self.rows, self.start)
            steps = self._workers.steps()
        else:
            reader = self.source.reader(self.rows)
            if self.start is not None:
                reader.load_state_dict(self.start)
            steps = reader.steps()
        for rows, state in steps:
            yield self._batch(rows, state)

    def _batch(self, rows: list[Row], state: dict[str, Any]) -> StepBatch:
        blanks = [blank_row(self.spec.seq_len)] * (self.size - len(rows))
        ids = torch.from_numpy(np.stack(rows + blanks))
        # A missing input may be any id: its label is ignored too.
        tokens, labels = ids[:, :-1].clamp(min=0), ids[:, 1:].contiguous()
        return StepBatch(tokens, labels, state | {"fingerprint": self.fingerprint})

    def _stalled(self) -> str:
        section, workers = self.spec.section, self.spec.options.num_workers
        doing = f"{workers} worker processes don't answer" if workers else f"still {self.retry.doing}"
        return (
            f"{section}.dataset: no data for {self.limit:g} s from {self.name}: {doing}. Check whether its storage or "
            f"network hangs, or raise {section}.dataloader.timeout_seconds (keep it below comm.train_timeout_seconds)."
        )

    def _warn_of_repeats(self) -> None:
        source, spec = self.source, self.spec
        if spec.infinite and isinstance(source, DocumentSource) and len(source.documents) < source.lanes:
            logger.warning(
                f"{spec.section}.dataset_path: {plural(len(source.documents), 'document')} for {source.lanes} rows per "
                "step: rows of the same step will repeat each other. Split the text into more documents, or convert it "
                "to token files with torchtitan tokenize, whose rows are windows at different positions"
            )
