"""Reads a source as training would, whole or a random sample, into a `Tally`."""

import itertools
import json
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.config.sections.data import Source
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import PLAIN
from torchtitan.data.read.corpus import Corpus, RawDocument
from torchtitan.data.read.files import find_token_files
from torchtitan.data.read.opening import DataError
from torchtitan.data.read.streams import StreamCursor, open_stream
from torchtitan.data.registered import RegisteredDocuments, open_custom
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.encoding import Encoded, Encoder
from torchtitan.data.tokens.tokenizing import batch_documents, encode_batches
from torchtitan.tools.corpus.columns import WHOLE, Drawn
from torchtitan.tools.corpus.sampling import WHOLE_BELOW, Draw, draw_items
from torchtitan.tools.corpus.tally import Reading, ReadOptions, Tally
from torchtitan.tools.corpus.token_reading import read_tokens
from torchtitan.utils.errors import UserError
from torchtitan.utils.meter import Meter
from torchtitan.utils.wording import plural, show_rate

_ALONE = 8 * 2**20
"""Below this size in bytes, this process encodes alone: starting others would take longer."""
_DRAWN_ALONE = 2000
"""Below this number of drawn documents, this process encodes alone."""


def read(spec: DataSpec, source: Source, options: ReadOptions) -> Reading:
    """Read a source.

    Raises:
        UserError: the source can't be read, or is a stream and no sample size is given.
    """
    key = f"{spec.key(source)}.dataset_path" if spec.section else source.name
    tally = Tally(spec.tokenizer.vocab_size, options.seed)
    try:
        return _SourceReader(spec, source, options, key, tally).read()
    except (OSError, DataError) as error:
        raise UserError(f"{key}: {error}") from None
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably for lack of memory; give fewer --workers"
        ) from None


@dataclass(frozen=True)
class _SourceReader:
    """Reads a source into a tally."""

    spec: DataSpec
    source: Source
    options: ReadOptions
    key: str
    """Name of the source in errors."""
    tally: Tally

    def read(self) -> Reading:
        spec = self.spec
        source = self.source
        chat = None
        if source.messages_column is not None:
            named = f"{spec.key(source)}.messages_column" if spec.section else "--messages-column"
            chat = Chat(spec.tokenizer, named)
        if (make := spec.custom.get(source.dataset)) is not None:
            registered = open_custom(
                make, source.dataset, source.dataset_path, spec.key(source), chat=chat
            )
            if isinstance(registered, RegisteredDocuments):
                return self._registered(registered)
            return self._stream(registered, chat)
        if source.dataset_path is not None:
            if token_files := find_token_files(source.dataset_path, self.key):
                return read_tokens(spec, self.options, token_files, self.key, tally=self.tally)
            return self._texts(Corpus(source.dataset_path, self.key, source.column))
        if source.dataset in ("demo", "c4_test", "demo_validation"):
            return self._texts(Corpus(source.dataset.replace("c4_test", "demo"), self.key))
        stream = open_stream(source.dataset, spec.key(source), source.column)
        return self._stream(stream, chat)

    # ---- kinds of sources

    def _texts(self, corpus: Corpus) -> Reading:
        sample = self.options.sample
        workers = self.options.workers
        if sample and corpus.stamps and corpus.size > WHOLE_BELOW * sample:
            draws = draw_items(corpus.stamps, self.source.column, sample, self.options.seed)
            self._encode_drawn(draws, 1 if sample < _DRAWN_ALONE else workers)
        else:
            with (meter := Meter(corpus.size)).bar:
                items = corpus.items(meter.advance)
                self._encode_whole(items, 1 if corpus.size < _ALONE else workers, meter)
        ignored = corpus.ignored.as_data()
        return Reading(self.tally, corpus.sources(), corpus.size, ignored=ignored)

    def _registered(self, documents: RegisteredDocuments) -> Reading:
        count = len(documents)
        sample = self.options.sample
        if sample and sample < count:
            rng = np.random.default_rng(self.options.seed)
            chosen = np.sort(rng.choice(count, sample, replace=False)).tolist()
            draws = (
                (self._item(i, documents[i]), [Drawn(count / sample, 1.0, unit, "places")])
                for unit, i in enumerate(chosen)
            )
            self._encode_drawn(draws, self.options.workers)
        else:
            items = (self._item(i, documents[i]) for i in range(count))
            self._encode_whole(items, self.options.workers)
        return Reading(self.tally, "registered documents", None)

    def _stream(self, stream: Any, chat: Chat | None) -> Reading:
        name = self.source.dataset
        sample = self.options.sample
        if sample is None:
            raise UserError(
                f"{self.spec.key(self.source)}.dataset: {name} is a stream, whose length is "
                "unknown; give --sample N to read its first N documents"
            )
        cursor = StreamCursor(
            stream,
            lane=0,
            lanes=1,
            infinite=False,
            retry=self.spec.retry(self.source),
            text_column=self.source.column,
            on_bad_document="skip",
            chat=chat,
        )
        texts = itertools.islice(iter(cursor.next, None), sample)
        items = (self._item(i, text) for i, text in enumerate(texts))
        self._encode_whole(items, self.options.workers)
        for kind, number in cursor.skipped.items():
            self.tally.add_bad(kind, f"{name}: {kind}", [WHOLE] * number)
        return Reading(self.tally, "stream, its first documents", None, is_stream=True)

    def _item(self, index: int, text: str) -> RawDocument:
        """Item of a decoded document, or of a conversation's JSON."""
        content: Any = text if self.source.messages_column is None else json.loads(text)
        return RawDocument(self.source.dataset, index + 1, {self.source.column: content})

    # ---- documents

    def _encoded(
        self, batches: Iterator[tuple[int, list[RawDocument]]], workers: int
    ) -> Iterator[tuple[int, Encoded, NDArray[np.int64]]]:
        """The number, encoded documents and plain token ids of each batch."""
        encoder = Encoder(
            self.spec.tokenizer.origin,
            self.source.column,
            stop=False,
            messages=self.source.messages_column is not None,
            key=self.key,
        )
        for number, encoded in encode_batches(batches, encoder, workers):
            yield number, encoded, encoded.ids.astype(np.int64) & PLAIN

    def _encode_whole(
        self, items: Iterable[RawDocument], workers: int, meter: Meter | None = None
    ) -> None:
        batches = ((0, batch) for batch in batch_documents(items))
        for _, encoded, ids in self._encoded(batches, workers):
            hashes = encoded.hashes
            self.tally.add(ids, encoded.lengths, hashes["bytes"].astype(np.int64), hashes)
            for kind, problem in encoded.bad:
                self.tally.add_bad(kind, problem)
            if meter is not None:
                documents, tokens, _ = self.tally.totals
                rate = show_rate(tokens / meter.seconds)
                meter.show(f"{plural(int(documents), 'document')}, {rate} tokens/s")

    def _encode_drawn(self, draws: Iterable[Draw], workers: int) -> None:
        waiting: list[list[Drawn]] = []

        def batches() -> Iterator[tuple[int, list[RawDocument]]]:
            for item, drawn in draws:
                waiting.append(drawn)
                yield len(waiting) - 1, [] if item is None else [item]

        for number, encoded, ids in self._encoded(batches(), workers):
            drawn = waiting[number]
            self.tally.add_drawn(ids, int(encoded.hashes["bytes"].sum()), drawn)
            for kind, _ in encoded.bad:
                self.tally.add_bad(kind, "", drawn)  # its line's number isn't known
