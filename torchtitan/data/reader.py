"""The rows of each step: read from all sources, by worker processes if there are any, and ahead.

StepReader   reads a share of the rows in this process
Workers      reads the share in `num_workers` processes, each of which has a `StepReader`
ReadAhead    runs either in a thread
"""

import itertools
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan.data.order.packing import PackingStats
from torchtitan.data.order.rows import (
    Row,
    Share,
    Shares,
    SourceReader,
    blank_row,
    divide,
    local_rows,
    scatter,
)
from torchtitan.data.read.positions import DataPosition, merge_positions
from torchtitan.data.sources import OpenSource, open_source
from torchtitan.data.spec import DataSpec
from torchtitan.utils.errors import UserError
from torchtitan.utils.signals import (
    become_stoppable,
    end_with_starter,
    helpers_shielded,
    kill_text,
    start_fork_server,
)
from torchtitan.utils.torch_compat import replaced

T = TypeVar("T")

_JOIN_SECONDS = 5.0
"""Wait for a hanging read to end. The process would abort if the thread ran C++ code while the
interpreter shuts down.
"""


@dataclass(frozen=True)
class StepRows:
    """A reader's rows of one step."""

    rows: list[Row]
    sources: list[int]
    """The source of each row by its index in the configuration."""
    epochs: list[float]
    """Epochs of each source that were read after the step."""
    position: DataPosition
    """The position after the step, with this reader's lanes."""
    packing_stats: Sequence[PackingStats] = ()
    """The cost of packing so far, for each source."""


class StepReader:
    """Reads a share of the rows of every step, in order."""

    def __init__(
        self, spec: DataSpec, sources: Mapping[str, OpenSource], share: Share, start: DataPosition
    ):
        """
        Args:
            start: position to continue from, with all lanes of its sources.
        """
        self.spec = spec
        self.share = share
        self.step = start.step
        self.shares = Shares()
        self.shares.seek(start.shares)
        self.readers: dict[str, SourceReader] = {}
        for name, source in sources.items():
            position = start.sources.get(name)
            self.readers[name] = source.reader(share, position)
            if position is not None:
                self.readers[name].seek(position)
        others = start.sources.keys() - sources.keys()
        self.parked_positions = {name: start.sources[name] for name in others}
        """Positions of sources that this run doesn't read. A later run may read them again."""

    def steps(self) -> Iterator[StepRows]:
        """The remaining steps. Training data has no end.

        Raises:
            UserError: all sources have ended.
        """
        while (rows := self._next()) is not None:
            yield rows

    def _next(self) -> StepRows | None:
        """The next step; None at the end of a finite pass."""
        plan = self.spec.at(self.step)
        count = plan.rows
        length = plan.seq_len
        limits: dict[str, int] = {}
        if self.spec.infinite:
            for name, reader in self.readers.items():
                limit = reader.remaining_rows(length)
                if limit is not None:
                    limits[name] = limit
        counts = divide(self.shares, plan.weights, count, limits)
        if sum(counts.values()) < count:
            raise UserError(
                f"{self.spec.section}.sources: all have been read max_epochs times; lower "
                "training.steps, or raise max_epochs"
            )
        slots = scatter(counts, self.spec.seed, self.step)
        row_of: dict[int, Row] = {}
        source_of: dict[int, int] = {}
        for index, (name, reader) in enumerate(self.readers.items()):
            if name in slots:
                rows = reader.read(self.step, count, slots[name], length)
                row_of.update(rows)
                source_of.update(dict.fromkeys(rows, index))
        if not row_of and not self.spec.infinite and all(r.ended for r in self.readers.values()):
            return None
        self.step += 1
        local = local_rows(count, self.share)
        blank = blank_row(length)
        return StepRows(
            [row_of.get(slot, blank) for slot in local],
            [source_of.get(slot, 0) for slot in local],
            [reader.epochs for reader in self.readers.values()],
            self.position(),
            packing_stats=[reader.packing_stats for reader in self.readers.values()],
        )

    def position(self) -> DataPosition:
        """The position after the last step, with this reader's lanes."""
        sources = {name: reader.position() for name, reader in self.readers.items()}
        return DataPosition(
            step=self.step, shares=self.shares.position(), sources=self.parked_positions | sources
        )


class Workers:
    """`num_workers` processes, each of which reads a consecutive share of the rank's rows."""

    def __init__(self, spec: DataSpec, share: Share, start: DataPosition):
        """
        Args:
            share: the rank's rows.
            start: position to continue from, with all lanes.
        """
        options = spec.options
        count = options.num_workers
        self.spec = spec
        self.shares = [(*share, (index, count)) for index in range(count)]
        self.first = start.step
        self.loader = DataLoader(
            _WorkerRows(spec, self.shares, start),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=count,
            persistent_workers=options.persistent_workers,
            prefetch_factor=options.prefetch_factor,
            # Forking a process that runs gloo's and NCCL's threads can deadlock.
            multiprocessing_context="forkserver",
            worker_init_fn=_start_worker,
        )

    def steps(self) -> Iterator[StepRows]:
        """The rank's rows of each step: DataLoader yields an item of each worker in turn."""
        with helpers_shielded():
            start_fork_server()  # now, so that workers inherit its folder's name
            workers = iter(self.loader)
        for step in itertools.count(self.first):
            try:
                items: list[StepRows | str | None] = [next(workers) for _ in self.shares]
            except RuntimeError as error:
                for worker in workers._workers:
                    if (worker.exitcode or 0) < 0:
                        section = self.spec.section.split(".")[0]
                        raise UserError(
                            f"{section}.dataloader.num_workers: worker process {worker.pid} "
                            f"{kill_text(worker.exitcode)}; fewer workers need less memory"
                        ) from error
                raise
            for item in items:
                if isinstance(item, str):
                    raise UserError(item)
            results = [item for item in items if isinstance(item, StepRows)]
            if not results:
                return
            plan = self.spec.at(step)
            rows: list[Row] = []
            sources: list[int] = []
            for item, share in zip(items, self.shares, strict=True):
                if isinstance(item, StepRows):
                    rows += item.rows
                    sources += item.sources
                else:  # its lanes ended before the others'
                    count = len(local_rows(plan.rows, share))
                    rows += [blank_row(plan.seq_len)] * count
                    sources += [0] * count
            epochs = zip(*(result.epochs for result in results), strict=True)
            stats = zip(*(result.packing_stats for result in results), strict=True)
            yield StepRows(
                rows,
                sources,
                [sum(of_source) / len(results) for of_source in epochs],
                merge_positions([result.position for result in results]),
                packing_stats=[sum(of_source, PackingStats()) for of_source in stats],
            )


class _WorkerRows(IterableDataset):
    """A worker's rows of each step; None at the end of a finite pass, or the text of an error."""

    def __init__(self, spec: DataSpec, shares: list[Share], start: DataPosition):
        self.spec = spec
        self.shares = shares
        self.start = start

    def __iter__(self) -> Iterator[StepRows | str | None]:
        info = get_worker_info()
        assert info is not None
        try:
            with _undivided():
                sources = {
                    source.name: open_source(self.spec, source, self.spec.retry(source))
                    for source in self.spec.sources
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


def _start_worker(_: int) -> None:
    become_stoppable()
    end_with_starter()


def _undivided() -> AbstractContextManager[None]:
    """Hide the worker from `datasets`, which would divide the shards that lanes divide."""
    return replaced(torch.utils.data, get_worker_info=lambda: None)


def _unchanged(item: T) -> T:
    """Keep numpy arrays: by default, DataLoader copies each into a shared-memory file."""
    return item


class ReadAhead(Generic[T]):
    """Runs `items` in a thread, up to `depth` items ahead."""

    def __init__(self, items: Iterator[T], depth: int):
        self.queue: queue.Queue[T | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._produce, args=(items,), name="data", daemon=True
        )
        self._thread.start()

    def get(self, timeout: float) -> T | None:
        """The next item; None at the end.

        Raises:
            queue.Empty: none came within `timeout` seconds.
            BaseException: whatever `items` raised.
        """
        item = self.queue.get(timeout=timeout)
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop after the item in progress."""
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    def _produce(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: T | BaseException | None) -> bool:
        """Queue an item; False if the consumer closed this first."""
        while not self._stop.is_set():
            try:
                self.queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
