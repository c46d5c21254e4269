"""Text to token files: one process finds the documents, workers decode and encode them in order.

    records (lines, rows, texts) -> batches -> encode, in any process -> token files

Imports no torch.
"""

import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby, islice
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.data.order.packing import Packer
from torchtitan.data.read.corpus import RawDocument, hash_text, uniform
from torchtitan.data.read.opening import BadDocument
from torchtitan.data.read.records import decode
from torchtitan.data.tokens.encoding import Encoded, Encoder, open_again
from torchtitan.data.tokens.token_files import token_dtype, write_token_file
from torchtitan.utils.errors import UserError
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.signals import end_with_starter, start_fork_server

_BATCH = 2**18
"""Bytes of a batch. Encoding a text takes hundreds of times its size for a moment."""
_SPOOLED = 2**25
"""Bytes of a file's held-out tokens that stay in memory; more go to a temporary file."""
_MAX_BAD = 100
"""Number of a file's bad documents that its description lists."""


def batch_documents(items: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    """Group documents into batches that are encoded at once."""
    batch: list[RawDocument] = []
    size = 0
    for item in items:
        batch.append(item)
        size += _size(item.content)
        if size >= _BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _size(content: Any) -> int:
    if isinstance(content, dict | list):
        return sum(map(_size, content.values() if isinstance(content, dict) else content))
    return len(content) if isinstance(content, bytes | str) else 100


@dataclass(frozen=True)
class Output:
    """The token files to write, each of consecutive documents."""

    folder: Path
    name: str
    documents_per_file: int
    """Includes bad documents."""
    common: dict[str, Any]
    """Entries of every file's description."""
    best_fit: int | None = None
    """Length of the rows that documents are packed into; None: they follow one another."""

    def file(self, index: int) -> Path:
        return self.folder / f"{self.name}-{index:05d}.bin"

    def existing(self) -> Iterator[int]:
        """Numbers of the files that have a description."""
        for file in self.folder.glob(f"{self.name}-*.json"):
            if (number := file.stem.removeprefix(f"{self.name}-")).isdigit():
                yield int(number)

    def meta(self, index: int) -> dict[str, Any] | None:
        """The description of a file; None if it isn't complete.

        Raises:
            UserError: it was made from another input or tokenizer, or with other options.
        """
        file = self.file(index)
        try:
            meta = read_json_object(file.with_suffix(".json"))
        except (OSError, ValueError):
            return None
        if any(meta.get(key) != value for key, value in self.common.items()):
            raise UserError(
                f"--output: {file} was made from another input or tokenizer, or with other options "
                "than now; choose an empty folder or another --name"
            )
        return meta if file.is_file() else None


@dataclass(frozen=True)
class HeldOutSplit:
    """Documents to write to other token files, chosen by the hash of their text: the same whatever
    their order and the number of files, and equal ones together.
    """

    share: float
    """Fraction of the documents."""
    output: Output
    tail: int | None = None
    """Hash of the only document to hold out: the end of a single one, see `split_alone`."""

    def choose(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """A mask of the documents that are held out."""
        if self.tail is not None:
            return np.asarray(hashes == self.tail)
        draws = [uniform(int(hash), "held-out") for hash in hashes]
        return np.array(draws) < self.share


def split_alone(
    items: Iterator[RawDocument], column: str, share: float
) -> tuple[Iterator[RawDocument], int | None]:
    """Documents, and None; for a single document, its beginning and its end as two documents, and
    the hash of the end.

    Args:
        share: of the characters, at the end.
    """
    first = list(islice(items, 2))
    if len(first) == 1:
        with suppress(BadDocument):  # which the encoder reports
            text = decode(first[0].content, column)
            at = int(len(text) * (1 - share))
            head, tail = text[:at], text[at:]
            if head and tail and head != tail:
                halves = [first[0]._replace(content={column: text}) for text in (head, tail)]
                return iter(halves), hash_text(tail)[0]
    return chain(first, items), None


def is_complete(index: int, output: Output, split: HeldOutSplit | None) -> bool:
    """Whether a token file and its held-out one are complete.

    Raises:
        UserError: see `Output.meta`.
    """
    outputs = [output, split.output] if split else [output]
    return all(target.meta(index) is not None for target in outputs)


def tokenize(
    items: Iterator[RawDocument],
    encoder: Encoder,
    output: Output,
    workers: int,
    advance: Callable[[int, int], None],
    split: HeldOutSplit | None = None,
) -> int:
    """Write the token files that aren't complete yet.

    Args:
        split: the documents to write to other files.
        advance: called with the numbers of documents and of tokens that were written.

    Returns:
        The number of token files, without held-out ones.

    Raises:
        UserError: see `Encoder` and `Output.meta`.
        OSError: writing fails.
    """
    file_count = 0

    def new_batches() -> Iterator[tuple[int, list[RawDocument]]]:
        nonlocal file_count
        for first in items:
            index = file_count
            file_count += 1
            documents = _take(chain([first], items), output.documents_per_file)
            if not is_complete(index, output, split):
                for batch in batch_documents(documents):
                    yield index, batch
            for _ in documents:  # skip the documents of a complete file
                pass

    tokenizer = open_again(encoder.tokenizer)
    encoded_batches = encode_batches(new_batches(), encoder, workers)
    for index, batches in groupby(encoded_batches, key=lambda pair: pair[0]):
        _write_file(
            output,
            index,
            (encoded for _, encoded in batches),
            tokenizer,
            advance=advance,
            split=split,
            flags=encoder.messages,
        )
    return file_count


def _take(items: Iterator[RawDocument], count: int) -> Iterator[RawDocument]:
    """Like `islice`, but doesn't hold the first item."""
    for _, item in zip(range(count), items, strict=False):
        yield item


def encode_batches(
    batches: Iterator[tuple[int, list[RawDocument]]], encoder: Encoder, workers: int
) -> Iterator[tuple[int, Encoded]]:
    """Encode numbered batches, in order; in this process with one worker."""
    if workers == 1:
        for index, batch in batches:
            yield index, encoder(batch)
        return
    _start_fork_server()
    futures: deque[tuple[int, Future[Encoded]]] = deque()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, context, initializer=end_with_starter) as pool:
        try:
            for index, batch in batches:
                futures.append((index, pool.submit(encoder, batch)))
                if len(futures) > 4 * workers:
                    first, future = futures.popleft()
                    yield first, future.result()
            while futures:
                first, future = futures.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_fork_server() -> None:
    """Start the server that starts the workers, without Ctrl-C for them: this process ends them."""
    resource_tracker.ensure_running()  # unblocks the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    start_fork_server()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class _Description:
    """Collects the entries of a token file's description that count its documents."""

    def __init__(self, output: Output, index: int):
        self.file = output.file(index)
        self.entries: dict[str, Any] = output.common | {
            "documents": 0,
            "bytes": 0,
            "bad": Counter(),
            "places": [],
        }

    def count(self, encoded: Encoded) -> None:
        self.entries["documents"] += len(encoded.sizes)
        self.entries["bytes"] += int(encoded.sizes.sum())

    def count_bad(self, bad: Sequence[tuple[str, str]]) -> None:
        for kind, problem in bad:
            self.entries["bad"][kind] += 1
            if len(self.entries["places"]) < _MAX_BAD:
                self.entries["places"].append(problem)


def _write_file(
    output: Output,
    index: int,
    batches: Iterator[Encoded],
    tokenizer: Tokenizer,
    advance: Callable[[int, int], None],
    split: HeldOutSplit | None,
    *,
    flags: bool,
) -> None:
    description = _Description(output, index)
    packer = output.best_fit and Packer(output.best_fit, tokenizer.end_for("--best-fit"))
    split_description = _Description(split.output, index) if split else None
    with SpooledTemporaryFile(_SPOOLED, dir=str(output.folder)) as spool:

        def ids() -> Iterator[NDArray[Any]]:
            for encoded in batches:
                description.count_bad(encoded.bad)
                if split and split_description:
                    mask = split.choose(encoded.hashes)
                    split_documents = encoded.only(mask)
                    split_description.count(split_documents)
                    spool.write(split_documents.ids.tobytes())
                    encoded = encoded.only(~mask)
                description.count(encoded)
                yield from packer.add(encoded.documents) if packer else [encoded.ids]
                advance(len(encoded.hashes), len(encoded.ids))
            if packer:
                yield packer.finish()
                description.entries |= packer.description

        marked = flags or packer is not None
        write_token_file(description.file, ids(), tokenizer, description.entries, flags=marked)
        if split_description:
            back = _read_back(spool, token_dtype(tokenizer, flags))
            write_token_file(
                split_description.file, back, tokenizer, split_description.entries, flags=flags
            )


def _read_back(spool: IO[bytes], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The ids in a temporary file."""
    spool.seek(0)
    while content := spool.read(_SPOOLED):
        yield np.frombuffer(content, dtype)
