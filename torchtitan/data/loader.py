"""This rank's batch of every step, read ahead of training.

DataSpec -> open_source -> Source.reader -> StepReader -> StepRows -> StepLoader -> StepBatch
"""

import math
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan.data.changed import ContentsRecord, check_packing, check_same
from torchtitan.data.encode.tokenizer import CONTINUES, PLAIN, UNPREDICTED
from torchtitan.data.order.packing import PackingStats
from torchtitan.data.order.rows import (
    IGNORE_INDEX,
    Share,
    Shares,
    blank_row,
    exhaustion_steps,
    planned_tokens,
    whole_steps,
)
from torchtitan.data.read.contents import FileLists
from torchtitan.data.read.positions import DataFingerprint, DataPosition, DataState, SourcePosition
from torchtitan.data.reader import ReadAhead, StepReader, StepRows, Workers
from torchtitan.data.sources import DocumentSource, TokenSource, open_source
from torchtitan.data.spec import DataSpec
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import USEFUL_EPOCHS, listed, plural, show_epochs


@dataclass(frozen=True)
class StepBatch:
    """This rank's rows of one step."""

    tokens: Tensor
    """`[rows, seq]` int64."""
    labels: Tensor
    """`[rows, seq]` int64: the next token, or `IGNORE_INDEX`."""
    position: DataPosition
    """The position after the step, with this rank's lanes; see `StepLoader.local_state`."""
    count: int
    """Rows of the step over all ranks."""
    sources: Tensor | None = None
    """`[rows]` int64: the source of each row by its index in the configuration."""
    epochs: Sequence[float] = ()
    """Epochs of each source that were read; for text, on this rank."""
    stage: int = 0
    """The stage of the data: 0, or the number of `[[training.stages]]` that have begun."""
    continues: Tensor | None = None
    """`[rows, seq]`, True for an end-of-text that doesn't end its document; None: there is none."""


_KEYS = {"tokenizer": "model.hf_assets_path", "seed": "debug.seed"}
"""Entries of a fingerprint that a position depends on, and their configuration keys."""


def build_loader(
    spec: DataSpec,
    *,
    dp_rank: int = 0,
    dp_degree: int = 1,
    limits: tuple[float, float] = (150.0, 50.0),
) -> "StepLoader":
    """Build the loader of a rank; by default, it reads all rows.

    Args:
        limits: seconds to wait for the first batch and for each later one, unless
            `dataloader.timeout_seconds` is set.

    Raises:
        UserError: the data is missing, damaged, empty, or made for another tokenizer.
    """
    later = spec.options.timeout_seconds or limits[1]
    return StepLoader(spec, ((dp_rank, dp_degree),), (max(limits[0], later), later))


class StepLoader:
    """Iterates over steps. Training data never ends; every iteration restarts a finite pass."""

    def __init__(self, spec: DataSpec, share: Share, limits: tuple[float, float]):
        """
        Args:
            share: the rows of each step that this rank reads.
            limits: seconds to wait for the first batch and for each later one.
        """
        self.spec = spec
        self.share = share
        self.limit, self.later_limit = limits
        self.name = spec.name
        self.retries = {source.name: spec.retry(source) for source in spec.sources}
        self.sources = {
            source.name: open_source(spec, source, self.retries[source.name])
            for source in spec.sources
        }
        self._warn_of_shared_lanes()
        self._warn_of_joined_windows({})
        self.record = ContentsRecord(
            spec, {name: source.contents for name, source in self.sources.items()}
        )
        self.start = _beginning(0)
        """Where the next iteration starts."""
        self._ahead: ReadAhead[StepBatch] | None = None
        self._workers: Workers | None = None
        self._packing_logged: set[str] = set()

    def size(self, step: int) -> int:
        """Rows of this rank's batch at a step, counted from 0."""
        plan = self.spec.at(step)
        ranks = math.prod(count for _, count in self.share)
        microbatches = -(-plan.rows // (ranks * plan.local_batch_size))
        return microbatches * plan.local_batch_size

    def stage_after(self, position: DataPosition) -> int:
        """The stage of the data of the step after a position, as in `StepBatch.stage`."""
        return self.spec.stage(position.step)

    @property
    def fingerprint(self) -> DataFingerprint:
        """The data that a position is valid for."""
        spec = self.spec
        return DataFingerprint(
            sources=self.record.fingerprints,
            tokenizer=spec.tokenizer.fingerprint,
            seq_len=spec.seq_len,
            seed=spec.seed,
            held_out=self.record.validation_sets,
        )

    def local_state(self, position: DataPosition) -> DataState:
        """A checkpoint's state, with this rank's lanes only; `complete_state` adds the others.

        Args:
            position: this rank's.
        """
        return DataState.model_construct(
            step=position.step,
            shares=position.shares,
            sources=position.sources,
            fingerprint=self.fingerprint,
        )

    def seek(self, state: DataState, lists: Callable[[], FileLists] = dict) -> None:
        """Continue from a recorded position. Ranks, workers, weights, batch sizes and the length of
        rows may differ.

        Args:
            lists: reads the recorded files of the sources at that position.

        Raises:
            UserError: the position is in other data, and `on_changed_data` doesn't allow that.
        """
        before = state.fingerprint
        now = self.fingerprint
        for name, key in _KEYS.items():
            check_same(name, key, getattr(before, name), getattr(now, name))
        positions = dict(state.sources)
        for name, position in positions.items():
            if name in self.sources and self.sources[name].kind != "tokens":
                check_packing(self.spec, position)
        for name in self.record.compare(state, lists):
            if positions[name].kind != self.sources[name].kind:
                why = "is data of another kind"
            elif positions[name].kind == "stream":
                why = "is another stream, in which the old position means nothing"
            else:
                positions[name] = positions[name].restarted()
                continue
            logger.warning(f"{self.spec.section}.sources: {name} {why}; starting at its beginning")
            del positions[name]
        self._announce_changes(set(before.sources))
        self._warn_of_joined_windows(positions)
        self.start = state.model_copy(update={"sources": positions})
        self._workers = None

    def begin(self, step: int) -> None:
        """Start all sources at their beginnings, and the stages at `step`, counted from 0."""
        self.start = _beginning(step)

    def check_enough(
        self, steps: int, *, step: int | None = None, position: DataPosition | None = None
    ) -> None:
        """Warn of sources that end before `steps`, or are read often until then.

        Args:
            step: steps trained so far: after the guard's rewinds, fewer than were read. Default:
                the steps read.
            position: the position after these steps; default: the start.

        Raises:
            UserError: all of them do.
        """
        position = position or self.start
        first = position.step
        rewound = 0 if step is None else first - step
        plans = self.spec.plans
        remaining_tokens = {
            name: tokens
            for name, source in self.sources.items()
            if (tokens := source.remaining_tokens(position.sources.get(name))) is not None
        }
        if remaining_tokens.keys() == self.sources.keys():
            enough = first + whole_steps(plans, sum(remaining_tokens.values()), first) - rewound
            if enough < steps:
                raise UserError(
                    f"training.steps: the data runs out after step {enough:,} of {steps:,} (every "
                    f"source reaches max_epochs); set training.steps = {enough}, or raise "
                    "max_epochs"
                )
        if first < steps:
            self._announce_epochs(steps)
        ends = exhaustion_steps(plans, remaining_tokens, range(first, steps + rewound - 1))
        for name, read in ends.items():
            logger.warning(
                f"{self.spec.section}.sources: {name} reaches max_epochs in step "
                f"{read + 1 - rewound:,} of {steps:,}; from then on the others share its weight"
            )

    def _announce_epochs(self, steps: int) -> None:
        """Log how often each source is read, if that is more than once."""
        for name, planned in planned_tokens(self.spec.plans, steps).items():
            source = self.sources[name]
            tokens = min(planned, source.remaining_tokens(None) or planned)
            size = source.tokens()
            if size and tokens > size:
                log = logger.warning if tokens > USEFUL_EPOCHS * size else logger.info
                key = "steps" if len(self.sources) == 1 else f"sources.{name}"
                log(f"{self.spec.section}.{key}: {show_epochs(tokens, size)}")

    def _announce_changes(self, before: set[str]) -> None:
        now = set(self.sources)
        key = f"{self.spec.section}.sources"
        if added := sorted(now - before):
            logger.info(f"{key}: new from this step: {', '.join(added)}")
        if removed := sorted(before - now):
            logger.info(f"{key}: no longer {', '.join(removed)}; their positions are kept")

    def skip_counts(self, position: DataPosition) -> Counter[str]:
        """Numbers of bad documents that were skipped, by kind.

        Args:
            position: has all lanes; a stream's documents are counted up to it.
        """
        counts = Counter[str]()
        for name, source in self.sources.items():
            if isinstance(source, DocumentSource):
                counts += source.documents.skip_counts
            elif name in position.sources:
                counts += position.sources[name].skip_counts
        return counts

    def __iter__(self) -> Iterator[StepBatch]:
        """
        Raises:
            UserError: reading fails (a disk or network error, a worker that was killed), or a batch
                doesn't arrive in time; the other ranks' collectives wait longer.
        """
        self.close()
        self._ahead = ahead = ReadAhead(self._batches(), self.spec.options.prefetch_factor or 2)
        while True:
            try:
                batch = ahead.get(self.limit)
            except queue.Empty:
                raise UserError(self._stalled()) from None
            except (OSError, EOFError, RuntimeError) as error:
                raise UserError(
                    f"{self.spec.section}.dataset: reading failed: {type(error).__name__}: {error}"
                ) from error
            if batch is None:
                return
            self.limit = self.later_limit
            yield batch

    @property
    def is_ready(self) -> bool:
        """Whether the next batch has been read ahead."""
        return self._ahead is not None and not self._ahead.queue.empty()

    def close(self) -> None:
        """Stop reading ahead. A later iteration starts afresh."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._workers is not None and not self.spec.options.persistent_workers:
            self._workers = None

    def _batches(self) -> Iterator[StepBatch]:
        if self.spec.options.num_workers:
            self._workers = self._workers or Workers(self.spec, self.share, self.start)
            steps = self._workers.steps()
        else:
            steps = StepReader(self.spec, self.sources, self.share, self.start).steps()
        for step, rows in enumerate(steps, self.start.step):
            self._log_packing(rows.packing_stats)
            yield self._batch(step, rows)

    def _log_packing(self, stats_of_sources: Sequence[PackingStats]) -> None:
        for source, stats in zip(self.spec.sources, stats_of_sources, strict=True):
            if stats.rows and source.name not in self._packing_logged:
                self._packing_logged.add(source.name)
                logger.info(f"{self.spec.key(source)}: so far, {stats}")

    def _batch(self, step: int, rows: StepRows) -> StepBatch:
        blanks = self.size(step) - len(rows.rows)
        plan = self.spec.at(step)
        ids = torch.from_numpy(np.stack(rows.rows + [blank_row(plan.seq_len)] * blanks))
        # A missing input may be any id: its label is ignored too.
        inputs = ids[:, :-1].clamp(min=0)
        targets = ids[:, 1:]
        return StepBatch(
            inputs & PLAIN,
            (targets & PLAIN).masked_fill(targets & UNPREDICTED != 0, IGNORE_INDEX),
            rows.position,
            plan.rows,
            sources=torch.tensor(rows.sources + [0] * blanks),
            epochs=rows.epochs,
            stage=self.spec.stage(step),
            continues=inputs & CONTINUES != 0,
        )

    def blank(self) -> StepBatch:
        """A first batch without labels."""
        return self._batch(0, StepRows([], [], [], self.start))

    def _stalled(self) -> str:
        section = self.spec.section
        workers = self.spec.options.num_workers
        reading = "; ".join(retry.doing for retry in self.retries.values())
        doing = f"{workers} worker processes don't answer" if workers else f"still {reading}"
        return (
            f"{section}.dataset: no data for {self.limit:g} s from {self.name}: {doing}. Check "
            f"whether its storage or network hangs, or raise {section.split('.')[0]}.dataloader."
            "timeout_seconds (keep it below comm.train_timeout_seconds)."
        )

    def _warn_of_shared_lanes(self) -> None:
        rows = max(self.spec.batch_sizes)
        for config, source in zip(self.spec.sources, self.sources.values(), strict=True):
            if self.spec.infinite and isinstance(source, DocumentSource) and source.lanes < rows:
                logger.warning(
                    f"{self.spec.key(config)}.dataset_path: {plural(source.lanes, 'document')} for "
                    f"{rows} rows per step: a step has consecutive rows of a document, and ranks "
                    "that share a document all tokenize it. Split the text into more documents, "
                    "or convert it to token files with torchtitan tokenize, whose rows are "
                    "windows at different positions"
                )

    def _warn_of_joined_windows(self, positions: Mapping[str, SourcePosition]) -> None:
        """
        Args:
            positions: positions to continue from; others start at their beginning.
        """
        lengths = sorted({plan.seq_len for plan in self.spec.plans})
        for name, source in self.sources.items():
            if not isinstance(source, TokenSource):
                continue
            width = source.width(positions.get(name))
            if cut_lengths := [length for length in lengths if width % length]:
                logger.warning(
                    f"{self.spec.section}.seq_len: rows of {listed(cut_lengths)} tokens of {name} "
                    f"are joined from parts of windows of {width}, in which it is shuffled. "
                    "Windows are as long as the longest stage at a source's first step: list that "
                    "stage from the start, and let its seq_len be a multiple of the others', or "
                    "read the source under a new name, from its beginning"
                )


def _beginning(step: int) -> DataPosition:
    """The position before a step at which no source has been read."""
    return DataPosition(step=step, shares=Shares().position(), sources={})
