"""Worker processes that read a rank's rows."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan.data.rows import Row, blank_row, merge_states, split_rows
from torchtitan.data.sources import DataSpec, open_source
from torchtitan.utils.errors import UserError
from torchtitan.utils.signals import become_stoppable, helpers_shielded
from torchtitan.utils.torch_faults import replaced


class Workers:
    """`num_workers` processes, each of which reads a consecutive share of the rank's rows."""

    def __init__(self, spec: DataSpec, rows: range, start: dict[str, Any] | None):
        """
        Args:
            start: merged position to continue from; None: from the beginning.
        """
        options = spec.options
        self.shares, self.seq_len = split_rows(rows, options.num_workers), spec.seq_len
        self.loader = DataLoader(
            _WorkerRows(spec, self.shares, start),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=options.num_workers,
            persistent_workers=options.persistent_workers,
            prefetch_factor=options.prefetch_factor,
            # Forking a process that runs gloo's and NCCL's threads can deadlock.
            multiprocessing_context="forkserver",
        )

    def steps(self) -> Iterator[tuple[list[Row], dict[str, Any]]]:
        """Rows and position of each step. DataLoader takes an item from each worker in turn, so one round is a step."""
        with helpers_shielded():
            items = iter(self.loader)
        while True:
            parts = [next(items) for _ in self.shares]
            for part in parts:
                if isinstance(part, str):
                    raise UserError(part)
            if all(rows is None for rows, _ in parts):
                return
            rows: list[Row] = []
            for (part, _), share in zip(parts, self.shares, strict=True):
                # A worker whose lanes end before the others' has none.
                rows += part or [blank_row(self.seq_len)] * len(share)
            yield rows, merge_states([state for _, state in parts])


class _WorkerRows(IterableDataset):
    """A worker's share of the rows, step by step, with its position. At the end of a finite pass the rows are None."""

    def __init__(self, spec: DataSpec, shares: list[range], start: dict[str, Any] | None):
        self.spec, self.shares, self.start = spec, shares, start

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        become_stoppable()
        try:
            reader = open_source(self.spec, self.spec.retry()).reader(self.shares[info.id])
            if self.start is not None:
                with _undivided():
                    reader.load_state_dict(self.start)
            while True:
                with _undivided():
                    rows = reader.step()
                yield rows, reader.state_dict()
        except UserError as error:
            # DataLoader re-raises only exceptions that take a single string, with a traceback as their text.
            while True:
                yield str(error)


def _undivided() -> AbstractContextManager[None]:
    """Hide from `datasets` that this is a worker: it would divide a stream's shards, which the lanes already divide."""
    return replaced(torch.utils.data, get_worker_info=lambda: None)


def _unchanged(item: Any) -> Any:
    """Keep numpy arrays: DataLoader's default would copy each into a shared-memory file of its own."""
    return item
