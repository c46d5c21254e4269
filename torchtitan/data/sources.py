"""The kinds of data source: token files, documents and streams. Each makes readers of its rows.

A module of the user registers others, see `registered`.
"""

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Literal

from torchtitan.config.sections.data import Source
from torchtitan.data.encode.chat import Chat
from torchtitan.data.order.lanes import (
    Cursor,
    DocumentCursor,
    Lane,
    LaneReader,
    PackedLane,
    StreamLane,
    lanes_within,
)
from torchtitan.data.order.rows import Share, SourceReader, local_rows
from torchtitan.data.order.windows import WindowOrder
from torchtitan.data.read.contents import Contents
from torchtitan.data.read.documents import Documents, open_documents
from torchtitan.data.read.files import find_token_files
from torchtitan.data.read.opening import Retry
from torchtitan.data.read.positions import SourcePosition
from torchtitan.data.read.streams import Stream, StreamCursor, open_stream
from torchtitan.data.registered import RegisteredDocuments, open_custom
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.token_files import TokenFiles, TokenReader
from torchtitan.utils.errors import UserError
from torchtitan.utils.wording import plural, show_size, show_tokens

_SAMPLE_DOCUMENTS = 16
_SAMPLE_BYTES = 100_000
"""Limits of the text from which tokens per byte are measured; one document is always read."""


class OpenSource(ABC):
    """An open data source."""

    kind: Literal["tokens", "documents", "stream"]
    """See `SourcePosition.kind`."""
    contents: Contents

    @abstractmethod
    def in_words(self) -> str:
        """The size of the source."""

    @abstractmethod
    def reader(self, share: Share, position: SourcePosition | None = None) -> SourceReader:
        """A reader of a share of the rows.

        Args:
            position: the reader is for this position, with its lanes or windows, and will seek it.
        """

    def tokens(self) -> int | None:
        """Tokens of an epoch, about; None if unknown."""
        return None

    def remaining_tokens(self, position: SourcePosition | None) -> int | None:
        """Tokens from a position, or the beginning, to the end; None without an end, or if its
        length is unknown.
        """
        return None


def open_source(spec: DataSpec, source: Source, retry: Retry) -> OpenSource:
    """Open a registered source, token files (`.bin`), local documents, or else a stream from the
    Hugging Face hub.

    Raises:
        UserError: the data is missing, damaged, empty, or made for another tokenizer.
    """
    return retry("the beginning", lambda: _open(spec, source, retry))


def _open(spec: DataSpec, source: Source, retry: Retry) -> OpenSource:
    for kind in (_open_registered, _open_tokens, _open_documents):
        if data := kind(spec, source, retry):
            return data
    return _open_stream(spec, source, retry)


def _open_registered(spec: DataSpec, source: Source, retry: Retry) -> OpenSource | None:
    make = spec.custom.get(source.dataset)
    if make is None:
        return None
    chat = _chat(spec, source)
    data = open_custom(make, source.dataset, source.dataset_path, spec.key(source), chat=chat)
    if isinstance(data, RegisteredDocuments):
        return DocumentSource(data, spec, retry, chat)
    stream = StreamSource(data, spec, source, retry, chat=chat)
    stream.check()
    return stream


def _open_tokens(spec: DataSpec, source: Source, retry: Retry) -> OpenSource | None:
    section = spec.key(source)
    key = f"{section}.dataset_path"
    paths = find_token_files(source.dataset_path, key) if source.dataset_path else []
    if not paths:
        return None
    if source.messages_column is not None:
        raise UserError(
            f"{section}.messages_column: {source.dataset_path} holds token files, which know what "
            "is predicted; remove the key"
        )
    files = TokenFiles(paths, spec.longest_row, spec.tokenizer, key)
    _check_packing(files, spec, section)
    return TokenSource(files, spec, source.max_epochs, retry)


def _open_documents(spec: DataSpec, source: Source, retry: Retry) -> OpenSource | None:
    chat = _chat(spec, source)
    documents = open_documents(
        source.dataset,
        source.dataset_path,
        spec.key(source),
        text_column=source.column,
        on_bad_document=spec.on_bad_document,
        cache_folder=spec.options.cache_folder,
        chat=chat,
    )
    return DocumentSource(documents, spec, retry, chat) if documents is not None else None


def _open_stream(spec: DataSpec, source: Source, retry: Retry) -> OpenSource:
    stream = open_stream(source.dataset, spec.key(source), source.column)
    return StreamSource(stream, spec, source, retry, chat=_chat(spec, source))


def _chat(spec: DataSpec, source: Source) -> Chat | None:
    """The encoder of a source's conversations; None if it holds text.

    Raises:
        UserError: a source of text has an end, or the tokenizer no chat template.
    """
    section = spec.key(source)
    if source.max_epochs is not None:
        raise UserError(
            f"{section}.max_epochs: the end of a text is known only from its tokens; write token "
            f"files with `torchtitan tokenize` and name them as {section}.dataset_path, or remove "
            "max_epochs"
        )
    if source.messages_column is None:
        return None
    return Chat(spec.tokenizer, f"{section}.messages_column")


def _check_packing(files: TokenFiles, spec: DataSpec, section: str) -> None:
    """
    Raises:
        UserError: the run has rows of other lengths than the files.
    """
    path = f"{section}.dataset_path"
    lengths = sorted({plan.seq_len for plan in spec.plans})
    key = f"{spec.section.split('.')[0]}.seq_len"
    if files.packed_length is None:
        if spec.packing == "best_fit":
            raise UserError(
                f"{path}: these token files are not packed; write them with `torchtitan tokenize "
                f'--best-fit {spec.seq_len}`, or set training.packing = "stream"'
            )
    elif lengths != [files.packed_length]:
        raise UserError(
            f"{path}: these token files are packed for rows of {files.packed_length} tokens; set "
            f"{key} = {files.packed_length}, also in all stages, or write them again with "
            f"`torchtitan tokenize --best-fit {lengths[-1]}`"
        )


class TokenSource(OpenSource):
    """Rows are windows of token files."""

    kind = "tokens"

    def __init__(self, files: TokenFiles, spec: DataSpec, max_epochs: int | None, retry: Retry):
        self.files = files
        self.retry = retry
        self.contents = files.contents
        self.seed = spec.seed if spec.infinite else None
        self.epochs = max_epochs if spec.infinite else 1
        self.side = max(spec.batch_sizes)

    def in_words(self) -> str:
        return f"{plural(len(self.files.files), 'token file')}, {show_tokens(self.tokens())} tokens"

    def tokens(self) -> int:
        return sum(count for *_, count in self.files.files)

    def reader(self, share: Share, position: SourcePosition | None = None) -> SourceReader:
        files = self._files(position)
        return TokenReader(files, share, self.seed, self._order(files), retry=self.retry)

    def remaining_tokens(self, position: SourcePosition | None) -> int | None:
        order = self._order(self._files(position))
        if position is not None and position.windows is not None:
            order.seek(position.windows)
        return order.remaining_rows(1)

    def width(self, position: SourcePosition | None) -> int:
        """The width of windows from a position, or the beginning."""
        windows = position and position.windows
        return windows.width if windows else self.files.width

    def _files(self, position: SourcePosition | None) -> TokenFiles:
        width = self.width(position)
        return self.files if width == self.files.width else self.files.in_windows_of(width)

    def _order(self, files: TokenFiles) -> WindowOrder:
        count = len(files)
        limit = None if self.epochs is None else self.epochs * count
        return WindowOrder(files.width, self.side, count, limit)


class _LaneSource(OpenSource):
    """Rows are cut from lanes of documents."""

    def __init__(
        self, contents: Contents, lanes: int, spec: DataSpec, retry: Retry, chat: Chat | None = None
    ):
        """
        Args:
            chat: the documents are conversations.
        """
        self.contents = contents
        self.lanes = lanes
        self.spec = spec
        self.retry = retry
        self.chat = chat

    @abstractmethod
    def cursor(self, lane: int, lanes: int) -> Cursor:
        """The documents of a lane."""

    def reader(self, share: Share, position: SourcePosition | None = None) -> SourceReader:
        spec = self.spec
        count = (position and position.lane_count) or self.lanes
        numbers: set[int] = set()
        for rows in spec.batch_sizes:
            numbers.update(lanes_within(local_rows(rows, share), rows, count))
        lanes = {lane: self._lane(self.cursor(lane, count)) for lane in sorted(numbers)}
        return LaneReader(self.contents.fingerprint, share, lanes, count)

    def _lane(self, cursor: Cursor) -> Lane:
        spec = self.spec
        encoder = self.chat or spec.tokenizer
        if spec.packing == "stream":
            return StreamLane(cursor, encoder)
        return PackedLane(cursor, encoder, spec.seq_len, spec.tokenizer.end_for("training.packing"))


class DocumentSource(_LaneSource):
    """Documents that can be read in any order; one lane per row, if there are enough.

    A single pass has up to 8 lanes, so that a limited one has seen several documents, and up to 256
    of at least 256 documents, so that many ranks needn't all tokenize everything.
    """

    kind = "documents"

    def __init__(
        self, documents: Documents, spec: DataSpec, retry: Retry, chat: Chat | None = None
    ):
        lanes = min(max(spec.batch_sizes), len(documents))
        if not spec.infinite:
            doublings = len(documents).bit_length() - 1
            lanes = 2 ** max(min(doublings, 3), min(doublings - 8, 8))
        super().__init__(documents.contents, lanes, spec, retry, chat)
        self.documents = documents

    def in_words(self) -> str:
        size = self.documents.text_bytes
        text = "" if size is None else f", {show_size(size)}"
        return plural(len(self.documents), "document") + text

    def tokens(self) -> int | None:
        """By the bytes per token of documents spread over the source."""
        documents = self.documents
        total = documents.text_bytes
        if not total:
            return None
        sample = max(1, min(_SAMPLE_DOCUMENTS, _SAMPLE_BYTES * len(documents) // total))
        tokens = size = 0
        for i in range(0, len(documents), -(-len(documents) // sample)):
            text = self.retry(f"document {i + 1}", partial(documents.__getitem__, i))
            if self.chat is None:
                text = text[:_SAMPLE_BYTES]
            pieces = (self.chat or self.spec.tokenizer).encode_in_pieces(text)
            tokens += sum(len(ids) for _, ids in pieces)
            size += len(text.encode())
        return total * tokens // max(1, size)

    def cursor(self, lane: int, lanes: int) -> Cursor:
        seed = self.spec.seed if self.spec.infinite else None
        return DocumentCursor(self.documents, lane, lanes, seed, retry=self.retry)


class StreamSource(_LaneSource):
    """A stream of documents; as many lanes as its shards allow."""

    kind = "stream"

    def __init__(
        self, stream: Stream, spec: DataSpec, source: Source, retry: Retry, chat: Chat | None = None
    ):
        # Every lane gets whole shards: if the number of lanes didn't divide theirs, each would read
        # the whole stream. A pass opens few shards.
        lanes = math.gcd(max(spec.batch_sizes) if spec.infinite else 8, stream.num_shards)
        reading = f"; chat template {chat.fingerprint}" if chat else ""
        name = " ".join(filter(None, (source.dataset, source.dataset_path)))
        super().__init__(Contents(f"stream of {name}{reading}"), lanes, spec, retry, chat)
        self.stream = stream
        self.column = source.column

    def in_words(self) -> str:
        return f"a stream of {plural(self.stream.num_shards, 'shard')}"

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
        return StreamCursor(
            self.stream,
            lane,
            lanes,
            self.spec.infinite,
            retry=self.retry,
            text_column=self.column,
            on_bad_document=self.spec.on_bad_document,
            chat=self.chat,
        )
