"""Reads a source as training would, whole or a part drawn at random, into a `Tally`."""

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
from torchtitan.tools.corpus.tally import How, Reading, Tally
from torchtitan.tools.corpus.token_reading import read_tokens
from torchtitan.utils.errors import UserError
from torchtitan.utils.meter import Meter
from torchtitan.utils.wording import plural, show_rate

_ALONE = 8 * 2**20
"""Bytes that this process encodes sooner than others have started."""
_DRAWN_ALONE = 2000
"""Documents drawn at random, likewise."""


def read(spec: DataSpec, source: Source, how: How) -> Reading:
    """Read a source.

    Raises:
        UserError: it can't be read, or is a stream without an end.
    """
    key = _key(spec, source)
    of_messages = f"{spec.key(source)}.messages_column" if spec.section else "--messages-column"
    make = spec.custom.get(source.dataset)
    chat = None
    if source.messages_column is not None:
        chat = Chat(spec.tokenizer, of_messages)
    try:
        if make is not None:
            registered = open_custom(
                make, source.dataset, source.dataset_path, spec.key(source), chat=chat
            )
            if isinstance(registered, RegisteredDocuments):
                return _registered(spec, source, how, registered)
            return _stream(spec, source, how, registered, chat)
        if source.dataset_path is not None:
            if token_files := find_token_files(source.dataset_path, key):
                return read_tokens(spec, how, token_files, key)
            return _texts(spec, source, how, Corpus(source.dataset_path, key, source.column))
        if source.dataset in ("demo", "c4_test", "demo_validation"):
            name = source.dataset.replace("c4_test", "demo")
            return _texts(spec, source, how, Corpus(name, key))
        stream = open_stream(source.dataset, spec.key(source), source.column)
        return _stream(spec, source, how, stream, chat)
    except (OSError, DataError) as error:
        raise UserError(f"{key}: {error}") from None
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably for lack of memory; give fewer --workers"
        ) from None


def _key(spec: DataSpec, source: Source) -> str:
    """What names the source in errors."""
    return f"{spec.key(source)}.dataset_path" if spec.section else source.name


# ---- documents


def _texts(spec: DataSpec, source: Source, how: How, corpus: Corpus) -> Reading:
    tally = Tally(spec.tokenizer.vocab_size, how.seed)
    files = plural(len(corpus.stamps), "file") if corpus.stamps else "demo text"
    if how.sample and corpus.stamps and corpus.size > WHOLE_BELOW * how.sample:
        draws = draw_items(corpus.stamps, source.column, how.sample, how.seed)
        if how.sample < _DRAWN_ALONE:
            how = replace(how, workers=1)
        _encode_drawn(spec, source, how, draws, tally=tally)
        return Reading(tally, files, corpus.size)
    if corpus.size < _ALONE:
        how = replace(how, workers=1)
    with (meter := Meter(corpus.size)).bar:
        items = corpus.items(meter.advance)
        _encode_whole(spec, source, how, items, tally=tally, meter=meter)
    return Reading(tally, files, corpus.size)


def _registered(
    spec: DataSpec, source: Source, how: How, documents: RegisteredDocuments
) -> Reading:
    tally = Tally(spec.tokenizer.vocab_size, how.seed)
    count = len(documents)
    kind = "registered documents"
    if how.sample and how.sample < count:
        chosen = np.sort(np.random.default_rng(how.seed).choice(count, how.sample, replace=False))
        draws = (
            (
                _item(source, int(i) + 1, documents[int(i)]),
                [Drawn(count / how.sample, 1.0, unit, "places")],
            )
            for unit, i in enumerate(chosen)
        )
        _encode_drawn(spec, source, how, draws, tally=tally)
    else:
        items = (_item(source, i + 1, documents[i]) for i in range(count))
        _encode_whole(spec, source, how, items, tally=tally)
    return Reading(tally, kind, None)


def _stream(spec: DataSpec, source: Source, how: How, stream: Any, chat: Chat | None) -> Reading:
    if how.sample is None:
        raise UserError(
            f"{spec.key(source)}.dataset: {source.dataset} is a stream, whose length is unknown; "
            "give --sample N to read its first N documents"
        )
    tally = Tally(spec.tokenizer.vocab_size, how.seed)
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
        for number in range(how.sample or 0):
            text = cursor.next()
            if text is None:
                return
            yield _item(source, number + 1, text)

    _encode_whole(spec, source, how, items(), tally=tally)
    for kind, number in cursor.skipped.items():
        tally.add_bad(kind, f"{source.dataset}: {kind}", [WHOLE] * number)
    return Reading(tally, "stream, its first documents", None, of_stream=True)


def _item(source: Source, number: int, text: str) -> RawDocument:
    """A document that was decoded, or the JSON of a conversation."""
    content: Any = text if source.messages_column is None else json.loads(text)
    return RawDocument(source.dataset, number, {source.column: content})


def _encoder(spec: DataSpec, source: Source) -> Encoder:
    return Encoder(
        str(spec.tokenizer.path),
        source.column,
        stop=False,
        messages=source.messages_column is not None,
        key=_key(spec, source),
    )


def _encode_whole(
    spec: DataSpec,
    source: Source,
    how: How,
    items: Iterable[RawDocument],
    tally: Tally,
    meter: Meter | None = None,
) -> None:
    encoder = _encoder(spec, source)
    batches = ((0, batch) for batch in batch_documents(items))
    for _, encoded in encode_batches(batches, encoder, how.workers):
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
    spec: DataSpec, source: Source, how: How, draws: Iterable[Draw], tally: Tally
) -> None:
    waiting: list[list[Drawn]] = []

    def batches() -> Iterator[tuple[int, list[RawDocument]]]:
        for item, drawn in draws:
            waiting.append(drawn)
            yield len(waiting) - 1, [] if item is None else [item]

    encoder = _encoder(spec, source)
    for number, encoded in encode_batches(batches(), encoder, how.workers):
        drawn = waiting[number]
        ids = encoded.ids.astype(np.int64) & PLAIN
        tally.add_drawn(ids, int(encoded.hashes["bytes"].sum()), drawn)
        for kind, _ in encoded.bad:
            tally.add_bad(kind, "", drawn)  # its line's number isn't known
