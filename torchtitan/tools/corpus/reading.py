"""Reads a source as training would, whole or a part drawn at random, into a `Tally`."""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.config.sections.data import Source
from torchtitan.data.flags import PLAIN
from torchtitan.data.registered import RegisteredDocuments, open_custom
from torchtitan.data.spec import DataSpec
from torchtitan.data.text.chat import Chat
from torchtitan.data.text.corpus import Corpus, Item
from torchtitan.data.text.files import REPORT, find_token_files
from torchtitan.data.text.retry import DataError
from torchtitan.data.text.streams import StreamCursor, open_stream
from torchtitan.data.text.texts import Text
from torchtitan.data.tokens.encoding import Encoder
from torchtitan.data.tokens.token_files import TokenFiles
from torchtitan.data.tokens.tokenizing import batches_of, encode_batches
from torchtitan.tools.corpus.columns import WHOLE, Drawn
from torchtitan.tools.corpus.sampling import WHOLE_BELOW, Draw, draw_items, draw_places
from torchtitan.tools.corpus.tally import Tally
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import read_regular
from torchtitan.utils.limits import JSON_BYTES
from torchtitan.utils.meter import Meter
from torchtitan.utils.text import plural, show_rate

_WINDOW = 2**20
"""Tokens of a token file that are read at once."""
_STEP = 2**12
"""Tokens read at once in search of the ends of a document."""
_REACH = 2**17
"""A longer document of a token file is cut, in tokens before and after the place."""


@dataclass(frozen=True)
class How:
    """How much to read."""

    sample: int | None
    """About this many documents of each source; None: everything."""
    seed: int
    workers: int


@dataclass(frozen=True)
class Reading:
    """What was read of a source."""

    tally: Tally
    kind: str
    """What the source is, in words."""
    size: int | None
    """Bytes of its files."""
    tokens: int | None = None
    """If they are known without reading."""
    report: dict[str, Any] | None = None
    """What `torchtitan tokenize` counted."""
    of_stream: bool = False
    """Whether these are the first documents of a stream."""


def read(
    spec: DataSpec,
    source: Source,
    how: How,
) -> Reading:
    """Read a source.

    Raises:
        UserError: it can't be read, or is a stream without an end.
    """
    key = f"{spec.key(source)}.dataset_path" if spec.section else source.name
    of_messages = f"{spec.key(source)}.messages_column" if spec.section else "--messages-column"
    make = spec.custom.get(source.dataset)
    chat = None
    if source.messages_column is not None:
        chat = Chat(spec.tokenizer, of_messages)
    try:
        if make is not None:
            made = open_custom(
                make,
                source.dataset,
                source.dataset_path,
                spec.key(source),
                chat,
            )
            if isinstance(made, RegisteredDocuments):
                return _registered(spec, source, how, made)
            return _stream(spec, source, how, made, chat)
        if source.dataset_path is not None:
            if found := find_token_files(source.dataset_path, key):
                return _tokens(spec, how, found, key)
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


# ---- documents


def _texts(
    spec: DataSpec,
    source: Source,
    how: How,
    corpus: Corpus,
) -> Reading:
    tally = Tally(spec.tokenizer.vocab_size, how.seed)
    files = plural(len(corpus.stamps), "file") if corpus.stamps else "demo text"
    if how.sample and corpus.stamps and corpus.size > WHOLE_BELOW * how.sample:
        draws = draw_items(corpus.stamps, source.column, how.sample, how.seed)
        _encode_drawn(spec, source, how, draws, tally)
        return Reading(tally, files, corpus.size)
    with (meter := Meter(corpus.size)).bar:
        items = corpus.items(meter.advance)
        _encode_whole(spec, source, how, items, tally, meter)
    return Reading(tally, files, corpus.size)


def _registered(
    spec: DataSpec,
    source: Source,
    how: How,
    documents: RegisteredDocuments,
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
        _encode_drawn(spec, source, how, draws, tally)
    else:
        items = (_item(source, i + 1, documents[i]) for i in range(count))
        _encode_whole(spec, source, how, items, tally)
    return Reading(tally, kind, None)


def _stream(
    spec: DataSpec,
    source: Source,
    how: How,
    stream: Any,
    chat: Chat | None,
) -> Reading:
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

    def items() -> Iterator[Item]:
        for number in range(how.sample or 0):
            text = cursor.next()
            if text is None:
                return
            yield _item(source, number + 1, text)

    _encode_whole(spec, source, how, items(), tally)
    for kind, number in cursor.skipped.items():
        tally.add_bad(kind, f"{source.dataset}: {kind}", [WHOLE] * number)
    return Reading(tally, "stream, its first documents", None, of_stream=True)


def _item(
    source: Source,
    number: int,
    text: Text,
) -> Item:
    """A document that was decoded, or the JSON of a conversation."""
    content: Any = text if source.messages_column is None else json.loads(str(text))
    return Item(source.dataset, number, {source.column: content})


def _encoder(spec: DataSpec, source: Source) -> Encoder:
    return Encoder(
        str(spec.tokenizer.path),
        source.column,
        stop=False,
        messages=source.messages_column is not None,
    )


def _encode_whole(
    spec: DataSpec,
    source: Source,
    how: How,
    items: Iterable[Item],
    tally: Tally,
    meter: Meter | None = None,
) -> None:
    encoder = _encoder(spec, source)
    batches = ((0, batch) for batch in batches_of(items))
    for _, (ids, lengths, hashes, bad) in encode_batches(batches, encoder, how.workers):
        tally.add(ids.astype(np.int64) & PLAIN, lengths, hashes["bytes"].astype(np.int64), hashes)
        for kind, problem in bad:
            tally.add_bad(kind, problem)
        if meter is not None:
            documents, tokens, _ = tally.totals
            rate = show_rate(tokens / meter.seconds)
            meter.show(f"{plural(int(documents), 'document')}, {rate} tokens/s")


def _encode_drawn(
    spec: DataSpec,
    source: Source,
    how: How,
    draws: Iterable[Draw],
    tally: Tally,
) -> None:
    waiting: list[list[Drawn]] = []

    def batches() -> Iterator[tuple[int, list[Item]]]:
        for item, drawn in draws:
            waiting.append(drawn)
            yield len(waiting) - 1, [] if item is None else [item]

    encoder = _encoder(spec, source)
    for place, (ids, _, hashes, bad) in encode_batches(batches(), encoder, how.workers):
        drawn = waiting[place]
        tally.add_drawn(ids.astype(np.int64) & PLAIN, int(hashes["bytes"].sum()), drawn)
        for kind, _ in bad:
            tally.add_bad(kind, "", drawn)  # its line's number isn't known


# ---- tokens


def _tokens(
    spec: DataSpec,
    how: How,
    found: list[Path],
    key: str,
) -> Reading:
    tally = Tally(spec.tokenizer.vocab_size, how.seed)
    files = TokenFiles(found, _WINDOW, spec.tokenizer, key)
    if files.packed is not None:
        raise UserError(
            f"{key}: these token files are packed: they hold padding and pieces of documents. Name "
            "the text, or token files written without --best-fit"
        )
    counts = [tokens for *_, tokens in files.files]
    sizes = spec.tokenizer.byte_lengths()
    eos = spec.tokenizer.eos_id
    if how.sample and sum(counts) > WHOLE_BELOW * how.sample:
        parts = _Parts(files.in_windows_of(_STEP), counts, eos)
        places = draw_places(counts, how.sample, np.random.default_rng(how.seed))
        for unit, (which, offset) in enumerate(places):
            ids = parts.document_at(which, offset)
            weight = sum(counts) / how.sample / len(ids)
            drawn = Drawn(weight, len(ids), unit, "places")
            tally.add_drawn(ids, int(sizes[ids].sum()), [drawn])
    else:
        _whole_tokens(files, counts, sizes, eos, tally)
    size = sum(stamp.size for stamp, *_ in files.files)
    return Reading(
        tally,
        plural(len(found), "token file"),
        size,
        sum(counts),
        _report_of(found),
    )


def _whole_tokens(
    files: TokenFiles,
    counts: list[int],
    sizes: NDArray[Any],
    eos: int,
    tally: Tally,
) -> None:
    """Add all documents. They end with end-of-text, or with their file."""
    index = 0
    for count in counts:
        held = np.empty(0, np.int64)
        windows = -(-(count - 1) // files.width)
        for i in range(windows):
            ids = files.window(index + i) & PLAIN
            held = np.concatenate([held, ids if i == 0 else ids[1:]])
            ends = np.flatnonzero(held == eos) + 1
            if i == windows - 1 and (not len(ends) or ends[-1] < len(held)):
                ends = np.append(ends, len(held))
            if not len(ends):
                continue
            whole, held = held[: ends[-1]], held[ends[-1] :]
            lengths = np.diff(ends, prepend=0)
            bytes_of_each = np.add.reduceat(sizes[whole].astype(np.int64), ends - lengths)
            tally.add(whole, lengths, bytes_of_each)
        index += windows


@dataclass(frozen=True)
class _Parts:
    """Documents around places of token files."""

    files: TokenFiles
    counts: list[int]
    """Tokens of each file."""
    eos: int

    def document_at(
        self,
        which: int,
        offset: int,
    ) -> NDArray[np.int64]:
        """The document around a token of a file, or the part of a long one."""
        width = self.files.width
        first_window = int(self.files.ends[which - 1]) if which else 0
        count = self.counts[which]
        last = (count - 2) // width
        number = min(offset // width, last)

        def window(i: int) -> NDArray[np.int64]:
            """Without the token that it shares with the next."""
            ids = self.files.window(first_window + i) & PLAIN
            return ids if i == last else ids[:width]

        own = window(number)
        inside = offset - number * width
        before = [own[:inside]]
        after = [own[inside:]]
        first = number
        while not (before[0] == self.eos).any() and first and (number - first) * width < _REACH:
            first -= 1
            before.insert(0, window(first))
        final = number
        while not (after[-1] == self.eos).any() and final < last:
            if (final - number) * width >= _REACH:
                break
            final += 1
            after.append(window(final))
        left = np.concatenate(before)
        right = np.concatenate(after)
        starts = np.flatnonzero(left == self.eos)
        ends = np.flatnonzero(right == self.eos)
        begin = starts[-1] + 1 if len(starts) else 0
        end = ends[0] + 1 if len(ends) else len(right)
        return np.concatenate([left[begin:], right[:end]])


def _report_of(found: list[Path]) -> dict[str, Any] | None:
    """Duplicates and bad documents that `torchtitan tokenize` counted beside the files."""
    folders = {file.parent for file in found}
    reports = sorted(report for folder in folders for report in folder.glob(f"*{REPORT}"))
    read: list[Any] = []
    for file in reports:
        with suppress(OSError, ValueError):
            read.append(json.loads(read_regular(file, JSON_BYTES)))
    sums = {"documents": 0, "bytes": 0}
    skipped: dict[str, int] = {}
    with suppress(AttributeError, KeyError, TypeError):
        for one in read:
            for name in sums:
                sums[name] += one["duplicates"][name]
            for kind, number in one["skipped"].items():
                skipped[kind] = skipped.get(kind, 0) + number
        return {"duplicates": sums, "skipped": skipped} if read else None
    return None
