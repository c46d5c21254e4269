"""Reads a source as training would, whole or a random sample, into a `Tally`."""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import numpy as np

from torchtitan.config.sections.data import Source
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import PLAIN
from torchtitan.data.read.corpus import Corpus, RawDocument
from torchtitan.data.read.files import find_token_files
from torchtitan.data.read.opening import DataError
from torchtitan.data.read.streams import StreamCursor, open_stream
from torchtitan.data.registered import RegisteredDocuments, open_custom
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.encoding import Encoder
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
    key = _key(spec, source)
    messages_key = f"{spec.key(source)}.messages_column" if spec.section else "--messages-column"
    make = spec.custom.get(source.dataset)
    chat = None
    if source.messages_column is not None:
        chat = Chat(spec.tokenizer, messages_key)
    try:
        if make is not None:
            registered = open_custom(
                make, source.dataset, source.dataset_path, spec.key(source), chat=chat
            )
            if isinstance(registered, RegisteredDocuments):
                return _registered(spec, source, options, registered)
            return _stream(spec, source, options, registered, chat)
        if source.dataset_path is not None:
            if token_files := find_token_files(source.dataset_path, key):
                return read_tokens(spec, options, token_files, key)
            return _texts(spec, source, options, Corpus(source.dataset_path, key, source.column))
        if source.dataset in ("demo", "c4_test", "demo_validation"):
            name = source.dataset.replace("c4_test", "demo")
            return _texts(spec, source, options, Corpus(name, key))
        stream = open_stream(source.dataset, spec.key(source), source.column)
        return _stream(spec, source, options, stream, chat)
    except (OSError, DataError) as error:
        raise UserError(f"{key}: {error}") from None
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably for lack of memory; give fewer --workers"
        ) from None


def _key(spec: DataSpec, source: Source) -> str:
    """Name of the source in errors."""
    return f"{spec.key(source)}.dataset_path" if spec.section else source.name


# ---- documents


def _texts(spec: DataSpec, source: Source, options: ReadOptions, corpus: Corpus) -> Reading:
    tally = Tally(spec.tokenizer.vocab_size, options.seed)
    ignored = corpus.ignored.as_data()
    if options.sample and corpus.stamps and corpus.size > WHOLE_BELOW * options.sample:
        draws = draw_items(corpus.stamps, source.column, options.sample, options.seed)
        if options.sample < _DRAWN_ALONE:
            options = replace(options, workers=1)
        _encode_drawn(spec, source, options, draws, tally=tally)
        return Reading(tally, corpus.sources(), corpus.size, ignored=ignored)
    if corpus.size < _ALONE:
        options = replace(options, workers=1)
    with (meter := Meter(corpus.size)).bar:
        items = corpus.items(meter.advance)
        _encode_whole(spec, source, options, items, tally=tally, meter=meter)
    return Reading(tally, corpus.sources(), corpus.size, ignored=ignored)


def _registered(
    spec: DataSpec, source: Source, options: ReadOptions, documents: RegisteredDocuments
) -> Reading:
    tally = Tally(spec.tokenizer.vocab_size, options.seed)
    count = len(documents)
    kind = "registered documents"
    if options.sample and options.sample < count:
        chosen = np.sort(
            np.random.default_rng(options.seed).choice(count, options.sample, replace=False)
        )
        draws = (
            (
                _item(source, int(i) + 1, documents[int(i)]),
                [Drawn(count / options.sample, 1.0, unit, "places")],
            )
            for unit, i in enumerate(chosen)
        )
        _encode_drawn(spec, source, options, draws, tally=tally)
    else:
        items = (_item(source, i + 1, documents[i]) for i in range(count))
        _encode_whole(spec, source, options, items, tally=tally)
    return Reading(tally, kind, None)


def _stream(
    spec: DataSpec, source: Source, options: ReadOptions, stream: Any, chat: Chat | None
) -> Reading:
    if options.sample is None:
        raise UserError(
            f"{spec.key(source)}.dataset: {source.dataset} is a stream, whose length is unknown; "
            "give --sample N to read its first N documents"
        )
    tally = Tally(spec.tokenizer.vocab_size, options.seed)
    cursor = StreamCursor(
        stream,
        lane=0,
        lanes=1,
        infinite=False,
        retry=spec.retry(source),
        text_column=source.column,
        on_bad_document="skip",
        chat=chat,
    )

    def items() -> Iterator[RawDocument]:
        for number in range(options.sample or 0):
            text = cursor.next()
            if text is None:
                return
            yield _item(source, number + 1, text)

    _encode_whole(spec, source, options, items(), tally=tally)
    for kind, number in cursor.skipped.items():
        tally.add_bad(kind, f"{source.dataset}: {kind}", [WHOLE] * number)
    return Reading(tally, "stream, its first documents", None, is_stream=True)


def _item(source: Source, number: int, text: str) -> RawDocument:
    """Item of a decoded document, or of a conversation's JSON."""
    content: Any = text if source.messages_column is None else json.loads(text)
    return RawDocument(source.dataset, number, {source.column: content})


def _encoder(spec: DataSpec, source: Source) -> Encoder:
    return Encoder(
        spec.tokenizer.origin,
        source.column,
        stop=False,
        messages=source.messages_column is not None,
        key=_key(spec, source),
    )


def _encode_whole(
    spec: DataSpec,
    source: Source,
    options: ReadOptions,
    items: Iterable[RawDocument],
    tally: Tally,
    meter: Meter | None = None,
) -> None:
    encoder = _encoder(spec, source)
    batches = ((0, batch) for batch in batch_documents(items))
    for _, encoded in encode_batches(batches, encoder, options.workers):
        ids = encoded.ids.astype(np.int64) & PLAIN
        hashes = encoded.hashes
        tally.add(ids, encoded.lengths, hashes["bytes"].astype(np.int64), hashes)
        for kind, problem in encoded.bad:
            tally.add_bad(kind, problem)
        if meter is not None:
            documents, tokens, _ = tally.totals
            rate = show_rate(tokens / meter.seconds)
            meter.show(f"{plural(int(documents), 'document')}, {rate} tokens/s")


def _encode_drawn(
    spec: DataSpec, source: Source, options: ReadOptions, draws: Iterable[Draw], tally: Tally
) -> None:
    waiting: list[list[Drawn]] = []

    def batches() -> Iterator[tuple[int, list[RawDocument]]]:
        for item, drawn in draws:
            waiting.append(drawn)
            yield len(waiting) - 1, [] if item is None else [item]

    encoder = _encoder(spec, source)
    for number, encoded in encode_batches(batches(), encoder, options.workers):
        drawn = waiting[number]
        ids = encoded.ids.astype(np.int64) & PLAIN
        tally.add_drawn(ids, int(encoded.hashes["bytes"].sum()), drawn)
        for kind, _ in encoded.bad:
            tally.add_bad(kind, "", drawn)  # its line's number isn't known
