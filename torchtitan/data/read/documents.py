"""Documents that can be read in any order: the demo text and local files."""

import io
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.read.contents import Contents, base_folder, data_file, sample_files
from torchtitan.data.read.files import find_text_files
from torchtitan.data.read.index import RANGE_BYTES, FileIndex, find_documents, new_index
from torchtitan.data.read.index_cache import IndexCache, cache_path
from torchtitan.data.read.opening import (
    BadDocument,
    DataError,
    FilePool,
    FileStamp,
    data_errors,
    is_compressed,
    open_data,
)
from torchtitan.data.read.records import SKIP_ADVICE, Conversations, decode, record_location
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.wording import plural

OnBad = Literal["stop", "skip"]

# Tests differ between distributions, and tables of encodings are not text.
_NOT_DEMO = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "ensurepip",
    "turtledemo",
    "__pycache__",
}
_VALIDATION_STRIDE = 20


class Documents(Protocol):
    """A fixed collection of texts."""

    contents: Contents
    skip_counts: Counter[str]
    """Numbers of bad documents, by kind."""

    @property
    def text_bytes(self) -> int | None:
        """Size of all texts as UTF-8; None if unknown."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...


class DemoDocuments:
    """The source files of Python's standard library: real text without a download.

    Every 20th file is held out for `demo_validation`.
    """

    def __init__(self, validation: bool):
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for folder, subfolders, names in os.walk(root):
            libraries = (name for name in subfolders if not name.endswith("-packages"))
            subfolders[:] = sorted(set(libraries) - _NOT_DEMO)
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        files.sort(key=lambda path: path.relative_to(root).as_posix())
        validation_files = files[::_VALIDATION_STRIDE]
        if not validation:
            del files[::_VALIDATION_STRIDE]
        self.files = validation_files if validation else files
        stamps = [FileStamp.of(file) for file in self.files]
        self.contents = Contents.of(sample_files(stamps, root))
        self.text_bytes = sum(stamp.size for stamp in stamps)
        self.skip_counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        with open_data(self.files[index]) as file:
            return io.TextIOWrapper(file, encoding="utf-8", errors="replace").read()


class LocalDocuments:
    """Files of the formats in `files.FORMATS`: a document per JSON line, array entry, row or text.

    They are indexed once, in the cache folder, or else at every start.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        key: str,
        *,
        text_column: str = "text",
        on_bad_document: OnBad = "stop",
        cache_folder: str | None = None,
        cache_key: str = "training.dataloader.cache_folder",
        chat: Conversations | None = None,
    ):
        """
        Args:
            key: the configuration key of `path`, for errors.
            cache_folder: None for the default folder, "none" for no cache.
            chat: the column holds conversations.
        """
        files = find_text_files(path, key)
        stop = on_bad_document == "stop"
        self._files = FilePool()
        self._column = text_column
        self._chat = chat
        self._folder: Path | None = None
        if cache_folder != "none":
            self._folder = cache_path(cache_folder, cache_key)
        self._ranges = list[NDArray[np.int64]]()
        """`[documents, 2]` for each file, without a cache folder."""
        with data_errors(key):
            stamps = [FileStamp.of(file) for file in files]
            if self._folder is None:
                self.indexes = self._index_in_memory(stamps, stop, cache_key)
            else:
                cache = IndexCache(self._folder, cache_key, chat)
                self.indexes = cache.open(stamps, text_column, stop)
            if stop and (location := next(self._bad_places(), None)):
                raise DataError(f"{location}{SKIP_ADVICE}")
        self._ends = np.cumsum([index.documents for index in self.indexes], dtype=np.int64)
        self.text_bytes = sum(index.text_bytes for index in self.indexes)
        self.skip_counts = Counter[str]()
        for index in self.indexes:
            self.skip_counts.update(index.bad)
        reading = ""
        if text_column != "text" or self.skip_counts:
            reading = f"{text_column}: {sorted(self.skip_counts.items())}"
        if chat is not None:
            reading += f" chat template {chat.fingerprint}"
        base = base_folder(path)
        data_files = [
            data_file(entry.path, base, entry.size, entry.sample) for entry in self.indexes
        ]
        self.contents = Contents.of(data_files, reading)
        if self.skip_counts:
            where = next(self._bad_places())
            logger.warning(
                f"{key}: skipping {show_bad_documents(self.skip_counts)}; the first is {where}"
            )

    def _index_in_memory(
        self, stamps: Sequence[FileStamp], stop: bool, cache_key: str
    ) -> list[FileIndex]:
        logger.info(
            f"Finding the documents of {plural(len(stamps), 'file')}, without a cache folder"
        )
        template = self._chat.fingerprint if self._chat else ""
        indexes = [new_index(stamp, self._column, template) for stamp in stamps]
        for index in indexes:
            if index.copied:
                compressed = is_compressed(Path(index.path))
                what = "compressed" if compressed else f"of the format {index.kind}"
                raise DataError(
                    f"{index.path} is {what} and can't be read in any order without a "
                    f'copy. With {cache_key} = "none" '
                    "only plain JSON lines and text can; name a folder, or tokenize "
                    "ahead, which needs no copy"
                )
        self._ranges = [find_documents(index, stop, chat=self._chat) for index in indexes]
        return indexes

    def _bad_places(self) -> Iterator[str]:
        """Location and problem of each file's first bad document."""
        for index in self.indexes:
            for number, problem in index.places[:1]:
                yield f"{record_location(Path(index.path), number)}: {problem}"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> str:
        which = int(np.searchsorted(self._ends, index, side="right"))
        file = self.indexes[which]
        number = index - (int(self._ends[which - 1]) if which else 0)
        start, end = self._byte_range(which, number)
        if file.kind == "json" and not file.copied:
            line = self._files.read(file.path, start, end - start, file.stamp)
            try:
                return decode(line, file.column, self._chat)
            except BadDocument as error:
                raise DataError(
                    f"{file.path}: byte {start + 1}: {error} (changed since it was indexed?)"
                ) from None
        stamp = self._cache_files(file)["texts"] if file.copied else file.stamp
        return self._files.read(stamp.path, start, end - start, stamp).decode()

    def _byte_range(self, which: int, number: int) -> tuple[int, int]:
        if self._folder is None:
            start, end = self._ranges[which][number]
        else:
            ranges = self._cache_files(self.indexes[which])["ranges"]
            content = self._files.read(ranges.path, number * RANGE_BYTES, RANGE_BYTES, ranges)
            start, end = np.frombuffer(content, np.int64)
        return int(start), int(end)

    def _cache_files(self, index: FileIndex) -> dict[str, FileStamp]:
        assert self._folder is not None
        return index.cache_files(self._folder)


def show_bad_documents(kinds: Counter[str]) -> str:
    """`4 bad documents (3 null text, 1 not UTF-8)`."""
    of_kinds = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
    return plural(kinds.total(), "bad document") + (f" ({of_kinds})" if of_kinds else "")


def open_documents(
    dataset: str,
    dataset_path: str | None,
    section: str,
    *,
    text_column: str = "text",
    on_bad_document: OnBad = "stop",
    cache_folder: str | None = None,
    chat: Conversations | None = None,
) -> Documents | None:
    """Open the local files or demo text that the configuration names; None if it names a stream.

    Raises:
        UserError: files are missing, damaged, empty, or of an unknown format.
    """
    documents: Documents
    if dataset_path is not None:
        documents = LocalDocuments(
            dataset_path,
            f"{section}.dataset_path",
            text_column=text_column,
            on_bad_document=on_bad_document,
            cache_folder=cache_folder,
            cache_key=f"{section.split('.')[0]}.dataloader.cache_folder",
            chat=chat,
        )
    elif dataset in ("demo", "c4_test", "demo_validation"):
        if dataset == "c4_test":
            logger.info(
                f'{section}.dataset: "c4_test" is an alias of "demo": the source of '
                "Python's standard library"
            )
        documents = DemoDocuments(validation=dataset == "demo_validation")
    else:
        return None
    check_has_text(documents, f"{section}.dataset_path", dataset_path or dataset)
    return documents


def check_has_text(documents: Documents, key: str, name: str) -> None:
    """
    Raises:
        UserError: there are no documents, or all are empty; training would only see begin-of-text
        and end-of-text.
    """
    if len(documents) == 0:
        counts = documents.skip_counts
        but = f" but {show_bad_documents(counts)}" if counts else ""
        raise UserError(f"{key}: {name} holds no documents{but}")
    if documents.text_bytes == 0:
        raise UserError(
            f"{key}: {name} holds no text: all its documents are empty ({len(documents):,} of them)"
        )
