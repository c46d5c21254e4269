"""Text to token files: one process finds the documents, others decode and encode them in order.

    records (lines, rows, texts) -> batches -> encode, in any process -> parts -> token files

Imports no torch.
"""

import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.data.order.packing import Packer
from torchtitan.data.read.corpus import Item, uniform
from torchtitan.data.tokens.duplicates import HASH, Seen, save_hashes
from torchtitan.data.tokens.encoding import Encoded, Encoder, open_again
from torchtitan.data.tokens.token_files import token_dtype, write_token_file
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.formats import read_json_object

_BATCH = 2**18
"""Bytes of a batch. Encoding a text takes hundreds of times its size for a moment."""
_SPOOLED = 2**25
"""Bytes of the held-out tokens of a part that are kept in memory; more go to a temporary file."""
_PLACES = 100
"""Number of a part's bad documents whose places are kept."""


def batches_of(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Documents that are encoded at once."""
    batch: list[Item] = []
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
    """The token files, each of a part of the documents."""

    folder: Path
    name: str
    part: int
    """Documents per file, including bad ones."""
    common: dict[str, Any]
    """Entries of every file's description."""
    best_fit: int | None = None
    """Length of the rows that documents are packed into; None: they follow one another."""
    near: bool = False
    """Whether the keys of near-duplicates lie beside every file."""

    def file(self, index: int) -> Path:
        return self.folder / f"{self.name}-{index:05d}.bin"

    def existing(self) -> Iterator[int]:
        """Numbers of the parts that have a description."""
        for file in self.folder.glob(f"{self.name}-*.json"):
            if (number := file.stem.removeprefix(f"{self.name}-")).isdigit():
                yield int(number)

    def meta(self, index: int) -> dict[str, Any] | None:
        """The description of a part; None if it isn't complete.

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
        beside = [".bin", ".hashes", ".keys"][: 3 if self.near else 2]
        return meta if all(file.with_suffix(one).is_file() for one in beside) else None

    def keys(self, index: int) -> NDArray[np.uint64]:
        """The keys of a part's documents, in any order."""
        file = self.file(index)
        if self.near:
            return np.fromfile(file.with_suffix(".keys"), "<u8")
        return np.fromfile(file.with_suffix(".hashes"), HASH)["hash"].copy()


@dataclass(frozen=True)
class HeldOut:
    """Documents to write to other token files, chosen by the hash of their text: the same whatever
    their order and the number of files, and equal ones together.
    """

    share: float
    """Fraction of the documents."""
    output: Output

    def choose(self, hashes: NDArray[Any]) -> NDArray[np.bool_]:
        """Which documents are held out."""
        drawn = [uniform(int(hash), "held-out") for hash in hashes["hash"]]
        return np.array(drawn) < self.share


def is_done(index: int, output: Output, held_out: HeldOut | None) -> bool:
    """Whether all files of a part are complete.

    Raises:
        UserError: see `Output.meta`.
    """
    outputs = [output, held_out.output] if held_out else [output]
    return all(one.meta(index) is not None for one in outputs)


def _see_again(seen: Seen, index: int, output: Output, held_out: HeldOut | None) -> None:
    """Add the documents of a part that an earlier call has written."""
    for one in [output, held_out.output] if held_out else [output]:
        seen.add(one.keys(index))


def tokenize(
    items: Iterator[Item],
    encoder: Encoder,
    output: Output,
    workers: int,
    advance: Callable[[int, int], None],
    held_out: HeldOut | None = None,
    drop_duplicates: bool = False,
) -> int:
    """Write the token files that are missing.

    Args:
        held_out: what to write apart, if anything.
        drop_duplicates: leave out documents that equal an earlier one of any part, or are its
            near-duplicates if the encoder makes keys of these.
        advance: called with the numbers of documents and of tokens that were written.

    Returns:
        The number of parts.

    Raises:
        UserError: see `Encoder` and `Output.meta`.
        OSError: writing fails.
    """
    parts = 0

    def todo() -> Iterator[tuple[int, list[Item]]]:
        nonlocal parts
        for first in items:
            index = parts
            parts += 1
            part = _take(chain([first], items), output.part)
            if not is_done(index, output, held_out):
                for batch in batches_of(part):
                    yield index, batch
            for _ in part:  # the part was done
                pass

    tokenizer = open_again(encoder.tokenizer)
    seen = Seen() if drop_duplicates else None
    following = 0
    every = encode_batches(todo(), encoder, workers)
    for index, batches in groupby(every, key=lambda part: part[0]):
        if seen:
            for done in range(following, index):
                _see_again(seen, done, output, held_out)
        following = index + 1
        encoded = (one for _, one in batches)
        _write_part(
            output,
            index,
            encoded,
            tokenizer,
            advance=advance,
            held_out=held_out,
            seen=seen,
            flags=encoder.messages,
        )
    return parts


def _take(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Like `islice`, but doesn't hold the first item."""
    for _, item in zip(range(count), items, strict=False):
        yield item


def encode_batches(
    batches: Iterator[tuple[int, list[Item]]], encoder: Encoder, workers: int
) -> Iterator[tuple[int, Encoded]]:
    """Encode numbered batches, in order; in this process with one worker."""
    if workers == 1:
        for index, batch in batches:
            yield index, encoder(batch)
        return
    _start_fork_server()
    waiting: deque[tuple[int, Future[Encoded]]] = deque()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("forkserver")) as pool:
        try:
            for index, batch in batches:
                waiting.append((index, pool.submit(encoder, batch)))
                if len(waiting) > 4 * workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_fork_server() -> None:
    """Start what starts the workers, so that they don't receive Ctrl-C: this process ends them."""
    resource_tracker.ensure_running()  # unblocks the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class _Part:
    """What the description of a token file says of its documents."""

    def __init__(self, output: Output, index: int):
        self.file = output.file(index)
        self._near = output.near
        self.about: dict[str, Any] = output.common | {"places": []}
        self._dropped: dict[str, NDArray[np.int64]] = {}
        self._hashes: list[NDArray[Any]] = []
        self._keys: list[NDArray[np.uint64]] = []
        self._bad: Counter[str] = Counter()

    def count(self, encoded: Encoded) -> None:
        self._hashes.append(encoded.hashes)
        if self._near:
            self._keys.append(encoded.keys)

    def count_bad(self, bad: Sequence[tuple[str, str]]) -> None:
        for kind, problem in bad:
            self._bad[kind] += 1
            if len(self.about["places"]) < _PLACES:
                self.about["places"].append(problem)

    def count_dropped(self, kind: str, hashes: NDArray[Any]) -> None:
        """Count documents that were dropped, as `exact` or `near` duplicates."""
        sizes = np.array([len(hashes), hashes["bytes"].sum()], np.int64)
        self._dropped[kind] = self._dropped.get(kind, 0) + sizes

    def finish(self) -> None:
        """Before the description is written, which says that everything is complete."""
        every = np.concatenate(self._hashes)
        save_hashes(self.file.with_suffix(".hashes"), every)
        if self._near:
            keys = np.concatenate(self._keys).astype("<u8")
            write_whole(self.file.with_suffix(".keys"), keys.tobytes())
        self.about.update(
            documents=len(every),
            bytes=int(every["bytes"].sum()),
            bad=dict(self._bad),
            dropped={kind: sizes.tolist() for kind, sizes in self._dropped.items()},
        )


def _write_part(
    output: Output,
    index: int,
    batches: Iterator[Encoded],
    tokenizer: Tokenizer,
    advance: Callable[[int, int], None],
    held_out: HeldOut | None,
    seen: Seen | None,
    *,
    flags: bool,
) -> None:
    part = _Part(output, index)
    packer = output.best_fit and Packer(output.best_fit, tokenizer.eos_id)
    apart = _Part(held_out.output, index) if held_out else None
    with SpooledTemporaryFile(_SPOOLED, dir=str(output.folder)) as spool:

        def ids() -> Iterator[NDArray[Any]]:
            for encoded in batches:
                part.count_bad(encoded.bad)
                if seen:
                    new = seen.take(encoded.keys)
                    exact = ~new & seen.has(encoded.keys[:, 0])
                    part.count_dropped("exact", encoded.hashes[exact])
                    if output.near:
                        part.count_dropped("near", encoded.hashes[~new & ~exact])
                    encoded = encoded.only(new)
                if held_out and apart:
                    chosen = held_out.choose(encoded.hashes)
                    held = encoded.only(chosen)
                    apart.count(held)
                    spool.write(held.ids.tobytes())
                    encoded = encoded.only(~chosen)
                part.count(encoded)
                yield from packer.add(encoded.documents) if packer else [encoded.ids]
                advance(len(encoded.hashes), len(encoded.ids))
            if packer:
                yield packer.finish()
                part.about |= packer.about
            part.finish()

        marked = flags or packer is not None
        write_token_file(part.file, ids(), tokenizer, part.about, flags=marked)
        if apart:
            apart.finish()
            back = _read_back(spool, token_dtype(tokenizer, flags))
            write_token_file(apart.file, back, tokenizer, apart.about, flags=flags)


def _read_back(spool: IO[bytes], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The ids in a temporary file."""
    spool.seek(0)
    while content := spool.read(_SPOOLED):
        yield np.frombuffer(content, dtype)
