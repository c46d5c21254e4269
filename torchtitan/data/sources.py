"""The three kinds of data source: token files, documents and streams. Each makes readers of its
rows.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, Protocol

from torchtitan.config.sections import data as config
from torchtitan.data.custom import is_stream, open_custom
from torchtitan.data.order.mixture import Phase
from torchtitan.data.order.rows import (
    Cursor,
    DocumentCursor,
    Lane,
    LaneReader,
    Share,
    SourceReader,
    TokenReader,
    lanes_within,
    own_rows,
)
from torchtitan.data.positions import DocumentPosition, SourcePosition
from torchtitan.data.text.contents import Contents
from torchtitan.data.text.documents import Documents, OnBad, open_documents
from torchtitan.data.text.files import find_token_files
from torchtitan.data.text.retry import Retry
from torchtitan.data.text.streams import StreamCursor, open_stream
from torchtitan.data.text.tokenizer import Tokenizer
from torchtitan.data.tokens.token_files import TokenFiles
from torchtitan.utils.errors import UserError

OnChanged = Literal["stop", "continue"]


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What to read, as plain values: worker processes get a copy."""

    sources: Sequence[config.Source]
    stages: Sequence[config.DataStage] = ()
    tokenizer: Tokenizer
    seq_len: int
    rows_per_step: int
    """Over all ranks, before the first stage that changes it; at least one each."""
    seed: int
    infinite: bool
    """Read epoch after epoch, shuffled; else make one pass in order."""
    options: config.DataLoader
    on_bad_document: OnBad = "stop"
    """What to do with documents that can't be decoded or have no text."""
    on_changed_data: OnChanged = "stop"
    """What a resume does if files have other contents than at the checkpoint."""
    section: str = "training"
    """Section of the configuration: `training` or `validation`."""
    custom: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Registered name to what makes its data."""

    @property
    def name(self) -> str:
        return ", ".join(source.dataset_path or source.dataset for source in self.sources)

    @cached_property
    def phases(self) -> list[Phase]:
        """What the stages make of the batch size and the weights, in order."""
        weights = {source.name: Fraction(str(source.weight)) for source in self.sources}
        phases = [Phase(0, self.rows_per_step, weights)]
        for stage in self.stages:
            changed = {name: Fraction(str(weight)) for name, weight in stage.weights.items()}
            rows = stage.global_batch_size or phases[-1].rows
            phases.append(Phase(stage.from_step - 1, rows, {**phases[-1].weights, **changed}))
        return phases

    def at(self, step: int) -> Phase:
        """The phase of a step, counted from 0."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first) - 1]

    @property
    def batch_sizes(self) -> set[int]:
        """Rows of any step."""
        return {phase.rows for phase in self.phases}

    def key(self, source: config.Source) -> str:
        """The section or table of the configuration that names a source."""
        return self.section if len(self.sources) == 1 else f"{self.section}.sources.{source.name}"

    def retry(self, source: config.Source) -> Retry:
        return Retry(self.key(source), source.dataset_path or source.dataset, self.options)


class Source(Protocol):
    """An open data source."""

    contents: Contents
    rows: int | None
    """Until the source ends; None if it doesn't, or that isn't known."""

    def reader(self, share: Share, lanes: int | None = None) -> SourceReader:
        """A reader of a share of the rows.

        Args:
            lanes: how many a saved position has.
        """

    def takes(self, position: SourcePosition) -> bool:
        """Whether a position in other contents means something in these."""


def open_source(spec: DataSpec, source: config.Source, retry: Retry) -> Source:
    """Open token files (`.bin`), local documents, or else a stream from the Hugging Face hub.

    Raises:
        UserError: the data is missing, damaged, empty, or made for another tokenizer.
    """
    return retry("the beginning", lambda: _open(spec, source, retry))


def _open(spec: DataSpec, source: config.Source, retry: Retry) -> Source:
    section = spec.key(source)
    make = spec.custom.get(source.dataset)
    if make is None and source.dataset_path is not None:
        key = f"{section}.dataset_path"
        if found := find_token_files(source.dataset_path, key):
            return TokenSource(
                TokenFiles(found, spec.seq_len, spec.tokenizer, key), spec, source, retry
            )
    if source.max_epochs is not None:
        raise UserError(
            f"{section}.max_epochs: the end of a text is known only from its tokens; "
            "write token files with "
            f"`torchtitan tokenize` and name them as {section}.dataset_path, or remove max_epochs"
        )
    if make is not None:
        made = open_custom(make, source.dataset, source.dataset_path, section)
        if not is_stream(made):
            return DocumentSource(made, spec, retry)
        stream = StreamSource(made, spec, source, retry)
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
    return StreamSource(
        open_stream(source.dataset, section, source.text_column), spec, source, retry
    )


class TokenSource:
    """Rows are windows of token files."""

    def __init__(
        self,
        files: TokenFiles,
        spec: DataSpec,
        source: config.Source,
        retry: Retry,
    ):
        self.files = files
        self.spec = spec
        self.retry = retry
        self.contents = files.contents
        self.epochs = source.max_epochs if spec.infinite else 1
        self.rows = None if self.epochs is None else self.epochs * len(files)
        """Until the source ends."""

    def reader(self, share: Share, lanes: int | None = None) -> SourceReader:
        return TokenReader(
            self.files, self.spec.seed, self.epochs, self.retry, shuffled=self.spec.infinite
        )

    def takes(self, position: SourcePosition) -> bool:
        return position.lanes is None


class _LaneSource(ABC):
    """Rows are cut from lanes of documents."""

    contents: Contents
    rows: int | None = None

    def __init__(self, lanes: int, spec: DataSpec, retry: Retry):
        self.lanes = lanes
        self.spec = spec
        self.retry = retry

    @abstractmethod
    def cursor(self, lane: int, lanes: int) -> Cursor:
        """The documents of a lane."""

    @abstractmethod
    def takes(self, position: SourcePosition) -> bool:
        """See `Source`."""

    def reader(self, share: Share, lanes: int | None = None) -> SourceReader:
        spec = self.spec
        lanes = lanes or self.lanes
        own = {
            lane
            for rows in spec.batch_sizes
            for lane in lanes_within(own_rows(rows, share), rows, lanes)
        }
        made = {
            lane: Lane(self.cursor(lane, lanes), spec.tokenizer, spec.seq_len)
            for lane in sorted(own)
        }
        return LaneReader(self.contents.fingerprint, made, lanes)


class DocumentSource(_LaneSource):
    """Documents that can be read in any order; one lane per row, if there are enough."""

    def __init__(self, documents: Documents, spec: DataSpec, retry: Retry):
        super().__init__(min(max(spec.batch_sizes), len(documents)), spec, retry)
        self.documents = documents
        self.contents = documents.contents

    def cursor(self, lane: int, lanes: int) -> Cursor:
        return DocumentCursor(
            self.documents, lane, lanes, self.spec.seed, self.spec.infinite, self.retry
        )

    def takes(self, position: SourcePosition) -> bool:
        lanes = (position.lanes or {}).values()
        return bool(lanes) and all(isinstance(lane.cursor, DocumentPosition) for lane in lanes)


class StreamSource(_LaneSource):
    """A stream of documents; as many lanes as its shards allow."""

    def __init__(
        self,
        stream: Any,
        spec: DataSpec,
        source: config.Source,
        retry: Retry,
    ):
        # Every lane gets whole shards: if the number of lanes didn't divide theirs, each would read
        # the whole stream.
        super().__init__(math.gcd(max(spec.batch_sizes), stream.num_shards), spec, retry)
        self.stream = stream
        self.source = source
        self.contents = Contents(f"stream of {source.dataset}")

    def takes(self, position: SourcePosition) -> bool:
        return False  # it holds a stream's own state

    def check(self) -> None:
        """
        Raises:
            UserError: the first document can't be read, or no checkpoint could hold the position
            after it.
        """
        first = self.cursor(0, self.lanes)
        first.next()
        first.position()

    def cursor(self, lane: int, lanes: int) -> Cursor:
        spec = self.spec
        return StreamCursor(
            self.stream,
            lane,
            lanes,
            spec.infinite,
            self.retry,
            self.source.text_column,
            spec.on_bad_document,
        )
