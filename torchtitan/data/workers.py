"""Worker processes that read a rank's rows."""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan.data.order.rows import Share, blank_row, own_rows
from torchtitan.data.positions import DataPosition, joined
from torchtitan.data.reader import Rows, StepReader
from torchtitan.data.sources import DataSpec, open_source
from torchtitan.utils.errors import UserError
from torchtitan.utils.signals import become_stoppable, helpers_shielded
from torchtitan.utils.torch_compat import replaced


class Workers:
    """`num_workers` processes, each of which reads a consecutive share of the rank's rows."""

    def __init__(self, spec: DataSpec, share: Share, start: DataPosition):
        """
        Args:
            share: the rank's.
            start: position to continue from, with all lanes.
        """
        options = spec.options
        self.spec = spec
        self.shares = [(*share, (i, options.num_workers)) for i in range(options.num_workers)]
        self.first = start.step
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

    def steps(self) -> Iterator[Rows]:
        """The rank's part of each step. DataLoader takes an item from each worker in turn, so one
        round is a step.
        """
        with helpers_shielded():
            items = iter(self.loader)
        for step in itertools.count(self.first):
            parts: list[Rows | str | None] = [next(items) for _ in self.shares]
            for part in parts:
                if isinstance(part, str):
                    raise UserError(part)
            found = [part for part in parts if isinstance(part, Rows)]
            if not found:
                return
            epochs = [
                sum(e) / len(found) for e in zip(*(part.epochs for part in found), strict=True)
            ]
            whole = Rows([], [], epochs, joined([part.position for part in found]))
            for part, share in zip(parts, self.shares, strict=True):
                # A worker whose lanes end before the others' has none.
                missing = (
                    0 if isinstance(part, Rows) else len(own_rows(self.spec.at(step).rows, share))
                )
                whole.rows.extend(
                    part.rows
                    if isinstance(part, Rows)
                    else [blank_row(self.spec.seq_len)] * missing
                )
                whole.sources.extend(part.sources if isinstance(part, Rows) else [0] * missing)
            yield whole


class _WorkerRows(IterableDataset):
    """A worker's share of the rows, step by step, with its position. At the end of a finite pass,
    None.
    """

    def __init__(self, spec: DataSpec, shares: list[Share], start: DataPosition):
        self.spec = spec
        self.shares = shares
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        become_stoppable()
        try:
            with _undivided():
                sources = {
                    one.name: open_source(self.spec, one, self.spec.retry(one))
                    for one in self.spec.sources
                }
                steps = StepReader(self.spec, sources, self.shares[info.id], self.start).steps()
            while True:
                with _undivided():
                    rows = next(steps, None)
                yield rows
        except UserError as error:
            # DataLoader re-raises only exceptions that take a single string, with a traceback as
            # their text.
            while True:
                yield str(error)


def _undivided() -> AbstractContextManager[None]:
    """Hide from `datasets` that this is a worker: it would divide a stream's shards, which the
    lanes already divide.
    """
    return replaced(torch.utils.data, get_worker_info=lambda: None)


def _unchanged(item: Any) -> Any:
    """Keep numpy arrays: DataLoader's default would copy each into a shared-memory file of its
    own.
    """
    return item
