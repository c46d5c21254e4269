"""Documents that can be read in any order: the demo text and local files."""

import hashlib
import io
import os
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.text.cache import open_cache
from torchtitan.data.text.contents import Contents, base_of, data_file, sampled
from torchtitan.data.text.files import (
    FileStamp,
    OpenFiles,
    find_text_files,
    is_compressed,
    open_data,
)
from torchtitan.data.text.index import RANGE, FileIndex, find_documents, new_index
from torchtitan.data.text.records import SKIP_ADVICE, FileText, decode, place
from torchtitan.data.text.retry import DataError
from torchtitan.data.text.texts import LONG, BadDocument, Text
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.text import plural

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
_HELD_OUT_EVERY = 20


class Documents(Protocol):
    """A fixed collection of texts."""

    contents: Contents
    skipped: Counter[str]
    """Documents that were left out, by kind."""

    @property
    def text_bytes(self) -> int | None:
        """Of all texts, as UTF-8; None if unknown."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Text: ...


class DemoDocuments:
    """The source files of Python's standard library: real text on every machine, without a
    download.

    Every 20th file is held out, for `demo_validation`.
    """

    def __init__(self, validation: bool):
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(
                d for d in subfolders if d not in _NOT_DEMO and not d.endswith("-packages")
            )
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        files.sort(key=lambda path: path.relative_to(root).as_posix())
        self.files = [f for i, f in enumerate(files) if (i % _HELD_OUT_EVERY == 0) == validation]
        stamps = [FileStamp.of(file) for file in self.files]
        listing = "".join(
            f"{f.relative_to(root)}:{s.size};" for f, s in zip(self.files, stamps, strict=True)
        )
        self.contents = Contents.of(
            sampled(stamps, root), hashlib.sha256(listing.encode()).hexdigest()[:16]
        )
        self.text_bytes = sum(stamp.size for stamp in stamps)
        self.skipped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        with open_data(self.files[index]) as file:
            return io.TextIOWrapper(file, encoding="utf-8", errors="replace").read()


class LocalDocuments:
    """Files of the formats that `files.FORMATS` names: one document per JSON line, array entry, row
    or text file.

    Where each is in its file is found out once and kept in the cache folder; without one, at every
    start.
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
    ):
        """
        Args:
            key: the configuration key of `path`, for errors.
            cache_folder: None: the default; "none": no cache.
        """
        files = find_text_files(path, key)
        stop = on_bad_document == "stop"
        cache = open_cache(cache_folder, cache_key)
        self._files = OpenFiles()
        self._held = list[NDArray[np.int64]]()
        self._cache = cache
        self._column = text_column
        try:
            stamps = [FileStamp.of(file) for file in files]
            self.indexes = (
                cache.open(stamps, text_column, stop)
                if cache
                else self._hold(stamps, stop, cache_key)
            )
            self._stop_at_bad(stop)
        except DataError as error:
            raise UserError(f"{key}: {error}") from None
        self._ends = np.cumsum([index.documents for index in self.indexes], dtype=np.int64)
        self.text_bytes = sum(index.text_bytes for index in self.indexes)
        self.skipped = sum((Counter(index.bad) for index in self.indexes), Counter[str]())
        listing = "".join(
            f"{file.name}:{stamp.size};" for file, stamp in zip(files, stamps, strict=True)
        )
        reading = ""
        if text_column != "text" or self.skipped:
            reading = f"{text_column}: {sorted(self.skipped.items())}"
        base = base_of(path)
        found = [data_file(i.path, base, i.size, i.sample) for i in self.indexes]
        self.contents = Contents.of(
            found,
            hashlib.sha256((listing + reading).encode(errors="surrogateescape")).hexdigest()[:16],
            reading,
        )
        if self.skipped:
            first = next(index for index in self.indexes if index.places)
            where = f"{place(Path(first.path), first.places[0][0])}: {first.places[0][1]}"
            logger.warning(f"{key}: skipping {counted(self.skipped)}; the first is {where}")

    def _hold(self, stamps: Sequence[FileStamp], stop: bool, cache_key: str) -> list[FileIndex]:
        """Index files in memory."""
        logger.info(
            f"Finding the documents of {plural(len(stamps), 'file')}, without a cache folder"
        )
        indexes = [new_index(stamp, self._column) for stamp in stamps]
        for index in indexes:
            if index.copied:
                what = (
                    "compressed"
                    if is_compressed(Path(index.path))
                    else f"of the format {index.kind}"
                )
                raise DataError(
                    f"{index.path} is {what} and can't be read in any order without a "
                    f'copy. With {cache_key} = "none" '
                    "only plain JSON lines and text can; name a folder, or tokenize "
                    "ahead, which needs no copy"
                )
        self._held = [find_documents(index, stop) for index in indexes]
        return indexes

    def _stop_at_bad(self, stop: bool) -> None:
        for index in self.indexes if stop else []:
            if index.places:
                number, problem = index.places[0]
                raise DataError(f"{place(Path(index.path), number)}: {problem}{SKIP_ADVICE}")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Text:
        which = int(np.searchsorted(self._ends, index, side="right"))
        file = self.indexes[which]
        number = index - (int(self._ends[which - 1]) if which else 0)
        start, end = self._range(which, number)
        if file.kind == "json" and not file.copied:
            try:
                return decode(
                    self._files.read(file.path, start, end - start, file.stamp), file.column
                )
            except BadDocument as error:
                raise DataError(
                    f"{file.path}: byte {start + 1}: {error} (changed since it was indexed?)"
                ) from None
        stamp = self._cache.texts(file) if file.copied and self._cache else file.stamp
        if end - start > LONG:
            return FileText(stamp.path, start, end, stamp)
        return self._files.read(stamp.path, start, end - start, stamp).decode()

    def _range(self, which: int, number: int) -> tuple[int, int]:
        if self._cache is None:
            start, end = self._held[which][number]
        else:
            kept = self._cache.ranges(self.indexes[which])
            start, end = np.frombuffer(
                self._files.read(kept.path, number * RANGE, RANGE, kept), np.int64
            )
        return int(start), int(end)


def counted(kinds: Counter[str]) -> str:
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
        skipped = f" but {counted(documents.skipped)}" if documents.skipped else ""
        raise UserError(f"{key}: {name} holds no documents{skipped}")
    if documents.text_bytes == 0:
        raise UserError(
            f"{key}: {name} holds no text: all its documents are empty ({len(documents):,} of them)"
        )
