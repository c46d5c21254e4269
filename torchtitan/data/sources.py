"""The kinds of data source: token files, documents and streams. Each makes readers of its rows.

A module of the user registers others with `make(dataset_path[, keys])`, which returns either

- numbered documents: `len(it)`, `it[i]`, the text of document i, and `fingerprint`, a string that
  changes when the texts do. Document i must be the same on every rank and at every call; which one
  is read when follows from the seed.
- a `datasets.IterableDataset` with a column of texts, for example by
  `IterableDataset.from_generator(texts, gen_kwargs={"shards": [...]})`, whose shards ranks divide
  among them. Its `state_dict()` is its position, and must be JSON.

Both take part in the global order of rows, in mixtures and in resumes as built-in sources do. Every
rank and every worker process calls `make`.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from torchtitan.config.sections import data as config
from torchtitan.data.order.mixture import StagePlan
from torchtitan.data.order.rows import (
    Cursor,
    Lane,
    LaneReader,
    Share,
    SourceReader,
    TokenReader,
    lanes_within,
    own_rows,
)
from torchtitan.data.order.windows import WindowOrder
from torchtitan.data.positions import SourcePosition
from torchtitan.data.text.contents import Contents
from torchtitan.data.text.documents import DocumentCursor, Documents, OnBad, open_documents
from torchtitan.data.text.files import find_token_files
from torchtitan.data.text.retry import Retry
from torchtitan.data.text.streams import Stream, StreamCursor, open_stream
from torchtitan.data.text.tokenizer import Tokenizer
from torchtitan.data.tokens.token_files import TokenFiles
from torchtitan.utils.errors import UserError

_CHECKED = 1000
"""Registered documents in which to look for text. Reading all may take long."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What to read, as plain values: worker processes get a copy."""

    sources: Sequence[config.Source]
    stages: Sequence[config.DataStage] = ()
    tokenizer: Tokenizer
    seq_len: int
    """Predicted tokens of a row, before the first stage that changes them."""
    rows_per_step: int
    """Rows over all ranks, before the first stage that changes it; at least one per rank."""
    local_batch_size: int = 1
    """Rows that a rank computes at once, before the first stage that changes them."""
    seed: int
    infinite: bool
    """Read epoch after epoch, shuffled; else make one pass in order."""
    options: config.DataLoader
    on_bad_document: OnBad = "stop"
    """What to do with documents that can't be decoded or have no text."""
    on_changed_data: Literal["stop", "continue"] = "stop"
    """What a resume does if files have other contents than at the checkpoint."""
    section: str = "training"
    """Section of the configuration: `training` or `validation`."""
    custom: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Registered sources: name to `make`."""

    @property
    def name(self) -> str:
        return ", ".join(source.dataset_path or source.dataset for source in self.sources)

    @cached_property
    def plans(self) -> list[StagePlan]:
        """The batch size and weights of each stage, in order."""
        weights = {source.name: Fraction(str(source.weight)) for source in self.sources}
        first = StagePlan(
            0,
            self.rows_per_step,
            weights,
            self.seq_len,
            self.local_batch_size,
        )
        plans = [first]
        for stage in self.stages:
            changed = {name: Fraction(str(weight)) for name, weight in stage.weights.items()}
            before = plans[-1]
            plan = StagePlan(
                stage.from_step - 1,
                stage.global_batch_size or before.rows,
                {**before.weights, **changed},
                stage.seq_len or before.seq_len,
                stage.local_batch_size or before.local_batch_size,
            )
            plans.append(plan)
        return plans

    def stage(self, step: int) -> int:
        """The index in `plans` of the plan for a step, counted from 0."""
        return bisect_right(self.plans, step, key=lambda plan: plan.first) - 1

    def at(self, step: int) -> StagePlan:
        """The plan for a step, counted from 0."""
        return self.plans[self.stage(step)]

    @property
    def longest_row(self) -> int:
        """The largest `seq_len` of any step."""
        return max(plan.seq_len for plan in self.plans)

    @property
    def batch_sizes(self) -> set[int]:
        """All numbers of rows that a step may have."""
        return {plan.rows for plan in self.plans}

    def key(self, source: config.Source) -> str:
        """The section or table of the configuration that names a source."""
        return self.section if len(self.sources) == 1 else f"{self.section}.sources.{source.name}"

    def retry(self, source: config.Source) -> Retry:
        return Retry(self.key(source), source.dataset_path or source.dataset, self.options)


class Source(ABC):
    """An open data source."""

    kind: Literal["tokens", "documents", "stream"]
    """See `SourcePosition.kind`."""
    contents: Contents

    @abstractmethod
    def reader(
        self,
        share: Share,
        saved: SourcePosition | None = None,
    ) -> SourceReader:
        """A reader of a share of the rows.

        Args:
            saved: a position that it will be asked to seek; with its lanes, or its windows.
        """

    def left(self, saved: SourcePosition | None) -> int | None:
        """Tokens from a position, or the beginning, until the source ends; None if it doesn't, or
        that isn't known.
        """
        return None


def open_source(
    spec: DataSpec,
    source: config.Source,
    retry: Retry,
) -> Source:
    """Open token files (`.bin`), local documents, or else a stream from the Hugging Face hub.

    Raises:
        UserError: the data is missing, damaged, empty, or made for another tokenizer.
    """
    return retry("the beginning", lambda: _open(spec, source, retry))


def _open(
    spec: DataSpec,
    source: config.Source,
    retry: Retry,
) -> Source:
    section = spec.key(source)
    make = spec.custom.get(source.dataset)
    if make is None and source.dataset_path is not None:
        key = f"{section}.dataset_path"
        if found := find_token_files(source.dataset_path, key):
            files = TokenFiles(
                found,
                spec.longest_row,
                spec.tokenizer,
                key,
            )
            return TokenSource(
                files,
                spec,
                source.max_epochs,
                retry,
            )
    if source.max_epochs is not None:
        raise UserError(
            f"{section}.max_epochs: the end of a text is known only from its tokens; "
            "write token files with "
            f"`torchtitan tokenize` and name them as {section}.dataset_path, or remove max_epochs"
        )
    if make is not None:
        made = open_custom(
            make,
            source.dataset,
            source.dataset_path,
            section,
        )
        if isinstance(made, RegisteredDocuments):
            return DocumentSource(made, spec, retry)
        stream = StreamSource(
            made,
            spec,
            source,
            retry,
        )
        stream.check()
        return stream
    documents = open_documents(
        source.dataset,
        source.dataset_path,
        section,
        text_column=source.text_column,
        on_bad_document=spec.on_bad_document,
        cache_folder=spec.options.cache_folder,
    )
    if documents is not None:
        return DocumentSource(documents, spec, retry)
    found_stream = open_stream(source.dataset, section, source.text_column)
    return StreamSource(
        found_stream,
        spec,
        source,
        retry,
    )


class TokenSource(Source):
    """Rows are windows of token files."""

    kind = "tokens"

    def __init__(
        self,
        files: TokenFiles,
        spec: DataSpec,
        max_epochs: int | None,
        retry: Retry,
    ):
        self.files = files
        self.retry = retry
        self.contents = files.contents
        self.seed = spec.seed if spec.infinite else None
        self.epochs = max_epochs if spec.infinite else 1
        self.side = max(spec.batch_sizes)

    def reader(
        self,
        share: Share,
        saved: SourcePosition | None = None,
    ) -> SourceReader:
        files = self._files(saved)
        return TokenReader(
            files,
            share,
            self.seed,
            self._order(files),
            self.retry,
        )

    def left(self, saved: SourcePosition | None) -> int | None:
        order = self._order(self._files(saved))
        if saved is not None and saved.windows is not None:
            order.seek(saved.windows)
        return order.left(1)

    def width(self, saved: SourcePosition | None) -> int:
        """The width of windows from a position, or the beginning."""
        return self.files.width if saved is None or saved.windows is None else saved.windows.width

    def _files(self, saved: SourcePosition | None) -> TokenFiles:
        width = self.width(saved)
        return self.files if width == self.files.width else self.files.in_windows_of(width)

    def _order(self, files: TokenFiles) -> WindowOrder:
        count = len(files)
        limit = None if self.epochs is None else self.epochs * count
        return WindowOrder(files.width, self.side, count, limit)


class _LaneSource(Source):
    """Rows are cut from lanes of documents."""

    def __init__(
        self,
        contents: Contents,
        lanes: int,
        spec: DataSpec,
        retry: Retry,
    ):
        self.contents = contents
        self.lanes = lanes
        self.spec = spec
        self.retry = retry

    @abstractmethod
    def cursor(
        self,
        lane: int,
        lanes: int,
    ) -> Cursor:
        """The documents of a lane."""

    def reader(
        self,
        share: Share,
        saved: SourcePosition | None = None,
    ) -> SourceReader:
        spec = self.spec
        count = (saved and saved.lane_count) or self.lanes
        own: set[int] = set()
        for rows in spec.batch_sizes:
            own.update(lanes_within(own_rows(rows, share), rows, count))
        read = {lane: Lane(self.cursor(lane, count), spec.tokenizer) for lane in sorted(own)}
        return LaneReader(
            self.contents.fingerprint,
            share,
            read,
            count,
        )


class DocumentSource(_LaneSource):
    """Documents that can be read in any order; one lane per row, if there are enough."""

    kind = "documents"

    def __init__(
        self,
        documents: Documents,
        spec: DataSpec,
        retry: Retry,
    ):
        lanes = min(max(spec.batch_sizes), len(documents))
        super().__init__(
            documents.contents,
            lanes,
            spec,
            retry,
        )
        self.documents = documents

    def cursor(
        self,
        lane: int,
        lanes: int,
    ) -> Cursor:
        seed = self.spec.seed if self.spec.infinite else None
        return DocumentCursor(
            self.documents,
            lane,
            lanes,
            seed,
            self.retry,
        )


class StreamSource(_LaneSource):
    """A stream of documents; as many lanes as its shards allow."""

    kind = "stream"

    def __init__(
        self,
        stream: Stream,
        spec: DataSpec,
        source: config.Source,
        retry: Retry,
    ):
        # Every lane gets whole shards: if the number of lanes didn't divide theirs, each would read
        # the whole stream.
        lanes = math.gcd(max(spec.batch_sizes), stream.num_shards)
        super().__init__(
            Contents(f"stream of {source.dataset}"),
            lanes,
            spec,
            retry,
        )
        self.stream = stream
        self.column = source.text_column

    def check(self) -> None:
        """
        Raises:
            UserError: the first document can't be read, or no checkpoint could hold the position
            after it.
        """
        first = self.cursor(0, self.lanes)
        first.next()
        first.position()

    def cursor(
        self,
        lane: int,
        lanes: int,
    ) -> Cursor:
        return StreamCursor(
            self.stream,
            lane,
            lanes,
            self.spec.infinite,
            self.retry,
            self.column,
            self.spec.on_bad_document,
        )


class RegisteredDocuments:
    """Documents of a registered source, checked."""

    text_bytes: None = None

    def __init__(
        self,
        made: Any,
        key: str,
    ):
        """
        Args:
            key: the start of messages.

        Raises:
            UserError: it lacks a method, or has no text.
        """
        self.made = made
        self.key = key
        self.skipped: Counter[str] = Counter()
        needed = ("__len__", "__getitem__", "fingerprint")
        if lacks := [name for name in needed if not hasattr(made, name)]:
            raise UserError(
                f"{key} made a {type(made).__name__} without {', '.join(lacks)}; "
                "documents need these, unless they are a datasets.IterableDataset"
            )
        if not isinstance(made.fingerprint, str):
            kind = type(made.fingerprint).__name__
            raise UserError(f"{key} has a fingerprint of type {kind}; it must be a string")
        self.contents = Contents(made.fingerprint)
        if not len(self):
            raise UserError(f"{key} is empty")
        count = min(len(self), _CHECKED)
        if not any(self[i] for i in range(count)):  # seldom reads more than one
            raise UserError(f"{key} holds no text in its first {count} documents")

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> str:
        text = self.made[index]
        if not isinstance(text, str):
            raise UserError(
                f"{self.key} has a {type(text).__name__} as document {index}; it must be a string"
            )
        return text


def open_custom(
    make: Callable[..., Any],
    dataset: str,
    dataset_path: str | None,
    section: str,
) -> "RegisteredDocuments | Stream":
    """Open a registered source.

    Raises:
        UserError: it is neither of the two kinds, or has no text.
    """
    made = make(dataset_path)
    if hasattr(made, "num_shards"):  # a stream; importing its class would take seconds
        stream: Stream = made
        return stream
    return RegisteredDocuments(made, f'{section}.dataset: "{dataset}"')
