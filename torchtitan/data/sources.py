"""The three kinds of data source: token files, documents and streams. Each makes a reader of any rows of a step."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtitan.config.data import DataLoader
from torchtitan.data.documents import Documents, OnBad, open_documents
from torchtitan.data.files import find_files
from torchtitan.data.retry import Retry
from torchtitan.data.rows import Cursor, DocumentCursor, Lane, LaneReader, RowReader, TokenReader, lanes_of
from torchtitan.data.streams import StreamCursor, open_stream
from torchtitan.data.token_files import TokenFiles
from torchtitan.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What to read, as plain values: worker processes get a copy."""

    dataset: str
    dataset_path: str | None
    tokenizer: Tokenizer
    seq_len: int
    rows_per_step: int
    """Over all ranks; at least one each."""
    seed: int
    infinite: bool
    """Read epoch after epoch, shuffled; else make one pass in order."""
    options: DataLoader
    text_column: str = "text"
    """Column or JSON key of the text."""
    on_bad_document: OnBad = "stop"
    """What to do with documents that can't be decoded or have no text."""
    section: str = "training"
    """Section of the configuration: `training` or `validation`."""

    @property
    def name(self) -> str:
        return self.dataset_path or self.dataset

    def retry(self) -> Retry:
        return Retry(self.section, self.name, self.options)


class Source(Protocol):
    """An open data source."""

    fingerprint: str
    """Changes when the contents do."""
    lanes: int
    """Number of sequences of documents that rows are cut from; 0 if every row can be read by itself."""

    def reader(self, rows: range) -> RowReader:
        """A reader of these rows of every step."""


def open_source(spec: DataSpec, retry: Retry) -> Source:
    """Open token files (`.bin`), local documents, or else a stream from the Hugging Face hub.

    Raises:
        UserError: the data is missing, damaged, empty, or made for another tokenizer.
    """
    return retry("the beginning", lambda: _open(spec, retry))


def _open(spec: DataSpec, retry: Retry) -> Source:
    if spec.dataset_path is not None and (pattern := _token_files(spec.dataset_path)):
        key = f"{spec.section}.dataset_path"
        return TokenSource(TokenFiles(find_files(pattern, key), spec.seq_len, spec.tokenizer, key), spec, retry)
    documents = open_documents(
        spec.dataset,
        spec.dataset_path,
        spec.section,
        text_column=spec.text_column,
        on_bad_document=spec.on_bad_document,
        cache_folder=spec.options.cache_folder,
    )
    if documents is not None:
        return DocumentSource(documents, spec, retry)
    return StreamSource(open_stream(spec.dataset, spec.section, spec.text_column), spec, retry)


def _token_files(path: str) -> str | None:
    """The glob of the token files that `path` names, a folder of them included."""
    folder = Path(path).expanduser()
    if folder.is_dir() and any(folder.glob("*.bin")):
        return f"{path}/*.bin"
    return path if path.endswith(".bin") else None


class TokenSource:
    """Rows are windows of token files."""

    lanes = 0

    def __init__(self, files: TokenFiles, spec: DataSpec, retry: Retry):
        self.files, self.spec, self.retry = files, spec, retry
        self.fingerprint = files.fingerprint

    def reader(self, rows: range) -> RowReader:
        spec = self.spec
        return TokenReader(self.files, rows, spec.rows_per_step, spec.seed, spec.infinite, self.retry)


class _LaneSource(ABC):
    """Rows are cut from lanes of documents, the same number of consecutive rows from each lane."""

    fingerprint: str

    def __init__(self, lanes: int, spec: DataSpec, retry: Retry):
        self.lanes, self.spec, self.retry = lanes, spec, retry

    @abstractmethod
    def cursor(self, lane: int) -> Cursor:
        """The documents of a lane."""

    def reader(self, rows: range) -> RowReader:
        per_lane = self.spec.rows_per_step // self.lanes
        lanes = {
            lane: Lane(self.cursor(lane), self.spec.tokenizer, self.spec.seq_len) for lane in lanes_of(rows, per_lane)
        }
        return LaneReader(lanes, rows, per_lane)


class DocumentSource(_LaneSource):
    """Documents that can be read in any order; one lane per row."""

    def __init__(self, documents: Documents, spec: DataSpec, retry: Retry):
        super().__init__(spec.rows_per_step, spec, retry)
        self.documents, self.fingerprint = documents, documents.fingerprint

    def cursor(self, lane: int) -> Cursor:
        return DocumentCursor(self.documents, lane, self.lanes, self.spec.seed, self.spec.infinite, self.retry)


class StreamSource(_LaneSource):
    """A stream of documents; as many lanes as its shards allow."""

    def __init__(self, stream: Any, spec: DataSpec, retry: Retry):
        # Every lane gets whole shards: if the number of lanes didn't divide theirs, each would read the whole stream.
        super().__init__(math.gcd(spec.rows_per_step, stream.num_shards), spec, retry)
        self.stream, self.fingerprint = stream, f"stream of {spec.dataset}"

    def cursor(self, lane: int) -> Cursor:
        spec = self.spec
        return StreamCursor(
            self.stream, lane, self.lanes, spec.infinite, self.retry, spec.text_column, spec.on_bad_document
        )
