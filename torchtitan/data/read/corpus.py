"""The documents of files or of the demo text, one after another, without an index or a copy.

For commands that read a corpus once: `torchtitan tokenize` and `torchtitan tokenizer`. Imports no
torch.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.data.read.contents import Contents, base_folder, sample_files
from torchtitan.data.read.documents import DemoDocuments
from torchtitan.data.read.files import Ignored, find_text_files
from torchtitan.data.read.opening import BadDocument, DataError, FileStamp, data_errors
from torchtitan.data.read.records import Conversations, decode, read_records, record_location
from torchtitan.utils.errors import UserError
from torchtitan.utils.wording import plural

_DEMO = (["demo"], ["demo_validation"])


class RawDocument(NamedTuple):
    """A document, not yet decoded."""

    file: str
    number: int
    content: Any

    @property
    def location(self) -> str:
        """The document in messages."""
        return record_location(Path(self.file), self.number)


class Corpus:
    """Everything that `training.dataset_path` reads, or the demo text."""

    def __init__(
        self,
        paths: str | Sequence[str],
        key: str,
        column: str = "text",
        *,
        chat: Conversations | None = None,
        stop: bool = True,
    ):
        """
        Args:
            paths: files, folders or globs; or `demo`, `demo_validation`.
            key: the option of `paths`, for errors.
            column: column or JSON key of the text.
            chat: reads the column as conversations; used by `texts`.
            stop: raise an error for a bad document instead of skipping it.

        Raises:
            UserError: there are no files, or one can't be read.
        """
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.key = key
        self.column = column
        self.chat = chat
        self.stop = stop
        self.skip_counts = Counter[str]()
        """Numbers of documents that `texts` skipped, by kind."""
        self.stamps: list[FileStamp] = []
        self.ignored = Ignored()
        self._demo: DemoDocuments | None = None
        if self.paths in _DEMO:
            self._demo = DemoDocuments(validation=self.paths == ["demo_validation"])
            self.size = self._demo.text_bytes
            return
        with data_errors(key):
            files = find_text_files(self.paths, key, self.ignored)
            self.stamps = [FileStamp.of(file) for file in files]
        self.size = sum(stamp.size for stamp in self.stamps)
        """Bytes of all files."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal only for the same documents in the same order."""
        if self._demo is not None:
            return self._demo.contents.fingerprint
        reading = "" if self.stop else "skip"
        if reading or self.column != "text":
            reading = f"{self.column}: {reading or 'stop'}"
        return Contents.of(sample_files(self.stamps, base_folder(self.paths)), reading).fingerprint

    def sources(self) -> str:
        """The sources in words."""
        if self._demo is not None:
            return "the demo text"
        return plural(len(self.stamps), "file") + self.ignored.in_words()

    def items(self, advance: Callable[[int], None]) -> Iterator[RawDocument]:
        """All documents, to be decoded in any process.

        Args:
            advance: called with the number of bytes of every read.

        Raises:
            UserError: a file can't be read.
        """
        if self._demo is not None:
            for i, file in enumerate(self._demo.files):
                advance(file.stat().st_size)
                yield RawDocument(str(file), i + 1, self._demo[i])
        for stamp in self.stamps:
            try:
                for number, content, _ in read_records(
                    Path(stamp.path), self.column, advance, stamp
                ):
                    yield RawDocument(stamp.path, number, content)
            except DataError as error:
                raise UserError(f"{self.key}: {error}") from error
            except OSError as error:
                raise UserError(f"{self.key}: {stamp.path}: {error.strerror or error}") from error

    def texts(self, advance: Callable[[int], None]) -> Iterator[tuple[str, int, int]]:
        """The text of every sound document, its hash and its size in bytes.

        Raises:
            UserError: a file can't be read, or a document is bad and `stop` is set.
        """
        for item in self.items(advance):
            try:
                text = decode(item.content, self.column, self.chat)
                hash, size = hash_text(text)
            except BadDocument as error:
                if self.stop:
                    raise bad_document(self.key, f"{item.location}: {error}") from None
                self.skip_counts[error.kind] += 1
            except DataError as error:
                raise UserError(f"{self.key}: {error}") from None
            else:
                yield text, hash, size


def bad_document(key: str, problem: str) -> UserError:
    """The error about a bad document."""
    return UserError(f"{key}: {problem}. --on-bad-document skip leaves such documents out")


def hash_text(text: str) -> tuple[int, int]:
    """A 64-bit hash of a text, wherever it occurs, and its size in bytes."""
    content = text.encode()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little"), len(content)


def uniform(hash: int, purpose: str) -> float:
    """A number in [0, 1) for the text of this hash; independent between purposes.

    Args:
        purpose: at most 16 bytes.
    """
    data = hash.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=6, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little") / 2**48
