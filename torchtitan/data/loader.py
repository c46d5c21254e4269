"""From the configuration to this rank's rows of every step, read ahead in a thread or in worker processes."""

import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan.config import schema
from torchtitan.data.documents import find_files, open_documents
from torchtitan.data.retry import Retry
from torchtitan.data.rows import (
    IGNORE_INDEX,
    DocumentCursor,
    Lane,
    LaneReader,
    Row,
    RowReader,
    TokenReader,
    lanes_of,
    merge_states,
)
from torchtitan.data.streams import StreamCursor, open_stream
from torchtitan.data.token_files import TokenFiles
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.signals import become_stoppable, helpers_shielded

_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class StepBatch:
    """This rank's part of one step."""

    tokens: Tensor
    """`[rows, seq]` int64."""
    labels: Tensor
    """`[rows, seq]` int64: the next token, or `IGNORE_INDEX`."""
    state: dict[str, Any]
    """This rank's part of the position after the step."""


@dataclass(frozen=True)
class _Source:
    """What to read, as plain values that travel to worker processes."""

    dataset: str
    dataset_path: str | None
    tokenizer: Tokenizer
    seq_len: int
    rows_per_step: int
    seed: int
    infinite: bool
    key: str
    options: schema.DataLoader

    @property
    def name(self) -> str:
        return self.dataset_path or self.dataset

    def open(self) -> "_Opened":
        retry = Retry(f"{self.key}.dataset", self.name, self.options)
        return retry("the list of files", partial(self._open, retry))

    def _open(self, retry: Retry) -> "_Opened":
        path_key = f"{self.key}.dataset_path"
        if self.dataset_path is not None:
            pattern = self.dataset_path if not _is_folder_of_tokens(self.dataset_path) else f"{self.dataset_path}/*.bin"
            if pattern.endswith(".bin"):
                files = TokenFiles(find_files(pattern, path_key), self.seq_len, self.tokenizer, path_key)
                return _Opened(files.fingerprint, 0, partial(self._token_rows, files, retry), retry)
        documents = open_documents(self.dataset, self.dataset_path, self.key)
        if documents is not None:
            lane: Callable[[int], Any] = lambda i: DocumentCursor(  # noqa: E731
                documents, i, self.rows_per_step, self.seed, self.infinite, retry
            )
            reader = partial(self._lane_rows, lane, 1)
            return _Opened(documents.fingerprint, self.rows_per_step, reader, retry, len(documents))
        stream = open_stream(self.dataset, self.key)
        # Whole shards for every lane: were they not to divide, `datasets` would read everything in each.
        lanes = math.gcd(self.rows_per_step, stream.num_shards)
        lane = lambda i: StreamCursor(stream, i, lanes, self.infinite, retry)  # noqa: E731
        reader = partial(self._lane_rows, lane, self.rows_per_step // lanes)
        return _Opened(f"stream of {self.dataset}", lanes, reader, retry)

    def _token_rows(self, files: TokenFiles, retry: Retry, rows: range) -> RowReader:
        return TokenReader(files, rows, self.rows_per_step, self.seed, self.infinite, retry)

    def _lane_rows(self, cursor: Callable[[int], Any], rows_per_lane: int, rows: range) -> RowReader:
        lanes = {i: Lane(cursor(i), self.tokenizer, self.seq_len) for i in lanes_of(rows, rows_per_lane)}
        return LaneReader(lanes, rows, rows_per_lane)


@dataclass(frozen=True)
class _Opened:
    fingerprint: str
    lanes: int
    """0 for random access to rows."""
    reader: Callable[[range], RowReader]
    retry: Retry
    documents: int | None = None
    """How many there are, where that is known."""


_KEYS = {
    "contents": "{section}.dataset",
    "tokenizer": "model.hf_assets_path",
    "seed": "debug.seed",
    "rows_per_step": "{section}.global_batch_size",
    "lanes": "{section}.dataset",
}
"""The configuration key behind each entry of a fingerprint, where their names differ."""


def build_loader(
    *,
    dataset: str,
    dataset_path: str | None,
    tokenizer: Tokenizer,
    seq_len: int,
    rows_per_step: int,
    dp_rank: int,
    dp_degree: int,
    seed: int,
    dataloader: schema.DataLoader,
    infinite: bool,
    key_prefix: str = "training",
    local_batch_size: int = 1,
    limits: tuple[float, float] = (150.0, 50.0),
) -> "StepLoader":
    """This rank's loader of `[training]` or `[validation]`.

    Args:
        rows_per_step: rows of one step over all ranks, at least one for each.
        local_batch_size: every rank gets the same multiple of this many rows, if need be with rows without labels.
        infinite: epoch after epoch, shuffled; else one pass in order.
        limits: seconds after which waiting for the first batch, and for a later one, is an error, unless
            `dataloader.timeout_seconds` says otherwise.

    Raises:
        UserError: the data is missing, damaged, empty, or made for another tokenizer.
    """
    rows = _split(range(rows_per_step), dp_degree)[dp_rank]
    batches = -(-rows_per_step // (dp_degree * local_batch_size))
    source = _Source(dataset, dataset_path, tokenizer, seq_len, rows_per_step, seed, infinite, key_prefix, dataloader)
    later = dataloader.timeout_seconds or limits[1]
    return StepLoader(source, rows, batches * local_batch_size, (max(limits[0], later), later))


class StepLoader:
    """Iterates over steps. Training data has no end; a finite pass begins anew with every iteration."""

    def __init__(self, source: _Source, rows: range, size: int, limits: tuple[float, float]):
        """
        Args:
            rows: those of each step that this rank reads.
            size: number of rows to deliver; rows without labels make up for it.
            limits: seconds to wait for the first batch, and for each later one.
        """
        self.source, self.rows, self.size, self.options = source, rows, size, source.options
        self.limit, self.later_limit = limits
        opened = source.open()
        self.reader, self.retry = opened.reader, opened.retry
        self.name = source.name
        self.fingerprint: dict[str, Any] = {
            "dataset": self.name,
            "contents": opened.fingerprint,
            "tokenizer": source.tokenizer.fingerprint,
            "seq_len": source.seq_len,
            "seed": source.seed,
        }
        if opened.lanes:
            self.fingerprint |= {"rows_per_step": source.rows_per_step, "lanes": opened.lanes}
        if source.infinite and opened.documents is not None and opened.documents < opened.lanes:
            logger.warning(
                f"{source.key}.dataset_path: {opened.documents} document(s) for {opened.lanes} rows per step: rows of "
                "one step repeat each other. Cut the text into more documents, or make token files of it with "
                "torchtitan tokenize: their rows are windows at different places"
            )
        self.start: dict[str, Any] | None = None
        self.pin = self.options.pin_memory and torch.cuda.is_available()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._workers: DataLoader | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a merged position, under any number of ranks and workers.

        Raises:
            UserError: it is the position in other data.
        """
        saved = state["fingerprint"]
        # The files' folder may have moved; what is in them may not have changed.
        for name in self.fingerprint | saved:
            old, new = saved.get(name), self.fingerprint.get(name)
            if old != new and name != "dataset":
                key = _KEYS.get(name, "{section}." + name).format(section=self.source.key)
                raise UserError(
                    f"{key}: the checkpoint's data position is for {name} {old}, but this run has {new}.\n"
                    'Set it back, or begin the data anew with checkpoint.exclude_from_loading = ["dataloader"].'
                )
        self.start = state
        self._workers = None

    def __iter__(self) -> Iterator[StepBatch]:
        self.close()
        return self._explained(self._ahead(self._from_workers() if self.options.num_workers else self._from_reader()))

    def _explained(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Name the key when reading fails: a disk or network error, a worker that was killed."""
        try:
            yield from batches
        except (OSError, EOFError, RuntimeError) as error:
            raise UserError(f"{self.source.key}.dataset: reading failed: {type(error).__name__}: {error}") from error

    def _batch(self, rows: list[Row], state: dict[str, Any]) -> StepBatch:
        blank = np.full(self.source.seq_len + 1, IGNORE_INDEX)
        ids = torch.from_numpy(np.stack(rows + [blank] * (self.size - len(rows))))
        # A missing id is never an input that matters: its label is ignored too.
        tokens, labels = ids[:, :-1].clamp(min=0), ids[:, 1:].contiguous()
        if self.pin:
            tokens, labels = tokens.pin_memory(), labels.pin_memory()
        return StepBatch(tokens, labels, state | {"fingerprint": self.fingerprint})

    def _ahead(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """`batches`, made in a thread ahead of their use.

        Raises:
            UserError: one doesn't come in time. On this rank, before the other ranks' collectives time out.
        """
        ahead: queue.Queue[StepBatch | BaseException | None] = queue.Queue(self.options.prefetch_factor or 2)
        stop = self._stop = threading.Event()

        def put(item: StepBatch | BaseException | None) -> bool:
            while not stop.is_set():
                try:
                    ahead.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def produce() -> None:
            try:
                for batch in batches:
                    if not put(batch):
                        return
                put(None)
            except BaseException as error:
                put(error)

        self._thread = threading.Thread(target=produce, name="data", daemon=True)
        self._thread.start()
        while True:
            try:
                item = ahead.get(timeout=self.limit)
            except queue.Empty:
                raise UserError(self._stalled()) from None
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            self.limit = self.later_limit
            yield item

    def _stalled(self) -> str:
        key, workers = self.source.key, self.options.num_workers
        doing = f"{workers} worker processes give no answer" if workers else f"still {self.retry.doing}"
        return (
            f"{key}.dataset: no data for {self.limit:g} s from {self.source.name}: {doing}. See whether its storage or "
            f"network hangs, or allow more time: {key}.dataloader.timeout_seconds (below comm.train_timeout_seconds)."
        )

    def _from_reader(self) -> Iterator[StepBatch]:
        reader = self.reader(self.rows)
        if self.start is not None:
            reader.load_state_dict(self.start)
        while (rows := reader.step()) is not None:
            yield self._batch(rows, reader.state_dict())

    def _from_workers(self) -> Iterator[StepBatch]:
        count = self.options.num_workers
        if self._workers is None:
            self._workers = DataLoader(
                _WorkerRows(self.source, self.rows, self.start),
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=count,
                persistent_workers=self.options.persistent_workers,
                prefetch_factor=self.options.prefetch_factor,
                # Forking a process that runs gloo's and NCCL's threads can deadlock.
                multiprocessing_context="forkserver",
            )
        # Items come in turn from worker 0, 1, ..., 0, 1, ...: `count` of them are one step.
        with helpers_shielded():
            items = iter(self._workers)
        shares = _split(self.rows, count)
        blank = np.full(self.source.seq_len + 1, IGNORE_INDEX)
        while True:
            parts = [next(items) for _ in range(count)]
            for part in parts:
                if isinstance(part, str):
                    raise UserError(part)
            if all(rows is None for rows, _ in parts):
                return
            # A worker whose lanes are used up before the others' delivers rows without labels.
            rows = [row for (part, _), share in zip(parts, shares, strict=True) for row in part or [blank] * len(share)]
            yield self._batch(rows, merge_states([state for _, state in parts]))

    def close(self) -> None:
        """Stop reading ahead. A later iteration starts again."""
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            # A thread that still runs C++ code while the interpreter shuts down aborts the process; one that hangs in
            # a read never ends.
            self._thread.join(_JOIN_SECONDS)
            self._stop = self._thread = None
        if self._workers is not None and not self.options.persistent_workers:
            self._workers = None


class _WorkerRows(IterableDataset):
    """One worker's share of the rank's rows. After the end of a finite pass it keeps saying so."""

    def __init__(self, source: _Source, rows: range, start: dict[str, Any] | None):
        self.source, self.rows, self.start = source, rows, start

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        become_stoppable()
        # `datasets` asks this to divide files among workers. The lanes divide them already.
        torch.utils.data.get_worker_info = lambda: None
        try:
            reader = self.source.open().reader(_split(self.rows, info.num_workers)[info.id])
            if self.start is not None:
                reader.load_state_dict(self.start)
            while True:
                rows = reader.step()
                yield rows, reader.state_dict()
        except UserError as error:
            # DataLoader can only raise again what takes a single string; the text is what matters.
            while True:
                yield str(error)


def _unchanged(item: Any) -> Any:
    """Keep rows as numpy arrays: the default would make each a tensor in a shared-memory file of its own."""
    return item


def _split(rows: range, count: int) -> list[range]:
    """`rows` in `count` consecutive parts, as even as can be."""
    cuts = [rows.start + len(rows) * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def _is_folder_of_tokens(path: str) -> bool:
    folder = Path(path).expanduser()
    return folder.is_dir() and any(folder.glob("*.bin"))
