"""The cache folder of local files: what `index` finds out about each, kept from run to run.

<key>.ranges        first byte of each sound document and the one after its last, two int64 each
<key>.texts         a copy of the texts, only of a file that can't be read at any place
<key>.json          what the file holds (`FileIndex`); written last, so the others are complete if
it exists
<key>.corpus.json   the same of all files of a source, so that a run opens thousands of files by
reading one

Keys are hashes of the files' paths, sizes and times and of the column. Any number of processes
share a folder: each makes the index of a file that no other is making, and waits for those of the
others.

`<key>.json` has the size, time, inode and hash of the other two. While these keep time and inode,
they are taken for what was written; else their contents are compared with the hash: all of
`.ranges`, samples of `.texts`. A file is indexed again if they differ.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.data.text.files import FileStamp, changed, data_handle, is_compressed, open_data
from torchtitan.data.text.identity import sample, whole
from torchtitan.data.text.index import RANGE, FileIndex, KeptFile, find_documents, key_of, new_index
from torchtitan.data.text.retry import DataError
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import read_regular, write_whole
from torchtitan.utils.logging import logger
from torchtitan.utils.text import listed, plural, show_size

_REPORT_SECONDS = 10.0
_WAIT_SECONDS = 0.2
_LARGEST = 2**32
"""Bytes of a record; that of a million files is smaller."""
_DOCUMENT = 2000
"""Bytes of a usual document in a file, and ..."""
_COMPRESSION = 4
"""... how much smaller compression makes it, for the estimate of what will be written."""


def default_folder() -> Path:
    """`$TORCHTITAN_CACHE`, or `torchtitan` in the user's cache folder."""
    if chosen := os.environ.get("TORCHTITAN_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "torchtitan")


class Cache:
    """Makes and finds the indexes of files."""

    def __init__(self, folder: Path, key: str):
        """
        Args:
            key: the configuration key that sets the folder, for messages.
        """
        self.folder = folder
        self.key = key
        self._reported = time.monotonic()

    def ranges(self, index: FileIndex) -> "Kept":
        assert index.ranges is not None
        return Kept(str(self._path(index, "ranges")), index.ranges, whole)

    def texts(self, index: FileIndex) -> "Kept":
        assert index.texts is not None
        return Kept(str(self._path(index, "texts")), index.texts, sample)

    def _path(self, index: FileIndex, ending: str) -> Path:
        return self.folder / f"{index.key}.{ending}"

    def open(self, stamps: Sequence[FileStamp], column: str, stop: bool) -> list[FileIndex]:
        """The indexes of files, made where they are missing.

        Raises:
            UserError: the folder can't be written to, or has too little space.
            DataError: a file can't be read, or has a bad document and `stop` is set.
        """
        corpus = self.folder / f"{key_of(stamps, column)}.corpus.json"
        if (complete := self._read_corpus(corpus, stamps, column)) is not None:
            return complete
        with self._errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            new = [new_index(stamp, column) for stamp in stamps]
            todo = {index.key: index for index in new}
            done = {key: known for key, index in todo.items() if (known := self._read(index))}
            if missing := [index for key, index in todo.items() if key not in done]:
                self._warn_of_damage(missing)
                self._announce(missing)
                self._make_all(missing, done, stop)
            found = [done[index.key] for index in new]
            with _locked(corpus.with_suffix(".lock")) as ending:
                if ending is not None:  # else another writes the same
                    write_whole(corpus, _record([index.model_dump() for index in found]))
        return found

    def _read_corpus(
        self, corpus: Path, stamps: Sequence[FileStamp], column: str
    ) -> list[FileIndex] | None:
        try:
            entries = json.loads(read_regular(corpus, _LARGEST))
            found = [FileIndex.model_validate(entry) for entry in entries]
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        by_key = {index.key: index for index in found}
        known = [self._sound(by_key.get(key_of([stamp], column)), stamp) for stamp in stamps]
        return [index for index in known if index is not None] if None not in known else None

    def _read(self, new: FileIndex) -> FileIndex | None:
        """The index of a file, if it was made."""
        try:
            index = FileIndex.model_validate(
                json.loads(read_regular(self._path(new, "json"), _LARGEST))
            )
        except (OSError, ValueError, RecursionError):
            return None
        return self._sound(index, new.stamp)

    def _sound(self, index: FileIndex | None, stamp: FileStamp) -> FileIndex | None:
        """An index that was read; None if it isn't of this file, or its files aren't as they were
        written.
        """
        if index is None or index.ranges is None or (index.copied and index.texts is None):
            return None
        if (
            index.key != key_of([stamp], index.column)
            or index.ranges.size != index.documents * RANGE
        ):
            return None
        if index.inode != stamp.inode:
            index = index.model_copy(update={"inode": stamp.inode})
            try:
                with open_data(stamp.path, stamp) as file:
                    if sample(file.fileno()) != index.sample:
                        return None
            except (OSError, DataError):
                return None
        kept = [self.ranges(index), *([self.texts(index)] if index.copied else [])]
        return index if all(file.is_sound() for file in kept) else None

    def _warn_of_damage(self, missing: Sequence[FileIndex]) -> None:
        if again := [index for index in missing if self._path(index, "json").exists()]:
            logger.warning(
                f"{self.folder}: what was kept of {plural(len(again), 'file')} was "
                "changed or deleted; indexing again: "
                f"{listed((index.path for index in again), 6)}"
            )

    def _announce(self, missing: Sequence[FileIndex]) -> None:
        """Say what is going to be written, and where."""
        copied = [index for index in missing if index.copied]
        texts = sum(index.size * (1 if index.kind == "array" else _COMPRESSION) for index in copied)
        size = texts + sum(index.size // _DOCUMENT * RANGE for index in missing)
        free = shutil.disk_usage(self.folder).free
        what = f"a copy of the texts of {plural(len(copied), 'file')} and " if copied else ""
        logger.info(
            f"Indexing {plural(len(missing), 'file')} "
            f"({show_size(sum(index.size for index in missing))}) once: {what}"
            f"the documents' positions go to {self.folder}, about {show_size(size)} of "
            f"{show_size(free)} free there. "
            f"{self.key} names another place"
        )
        if sum(index.size for index in copied if is_compressed(Path(index.path))) > free:
            raise UserError(
                f"{self.key}: {self.folder} has {show_size(free)} free, too little for "
                f"{what}the documents' positions: "
                f"about {show_size(size)}. Name a folder with more space, or tokenize "
                "the files ahead (torchtitan "
                "tokenize), which needs no copy"
            )
        if size > free:
            logger.warning(
                f"{self.key}: {self.folder} may be too small for about {show_size(size)}"
            )

    def _make_all(
        self, missing: Sequence[FileIndex], done: dict[str, FileIndex], stop: bool
    ) -> None:
        left = list(missing)
        while left:
            before = len(left)
            for index in list(left):
                found = self._make(
                    index, stop, f"{len(missing) - len(left)} of {plural(len(missing), 'file')}"
                )
                if found is not None:
                    done[index.key] = found
                    left.remove(index)
            if len(left) == before:
                self._report(
                    f"waiting for other processes to index {plural(len(left), 'file')}, "
                    f"as {left[0].path}"
                )
                time.sleep(_WAIT_SECONDS)

    def _make(self, index: FileIndex, stop: bool, so_far: str) -> FileIndex | None:
        """The index of a file; None if another process is making it."""
        with _locked(self.folder / f"{index.key}.lock") as ending:
            if ending is None or (found := self._read(index)):
                return None if ending is None else found
            index = index.model_copy(deep=True)
            ranges = self._path(index, f"ranges.{ending}")
            texts = self._path(index, f"texts.{ending}")
            count = 0

            def advance() -> None:
                nonlocal count
                count += 1
                if not count % 1000:
                    self._report(f"indexed {so_far}, and {count:,} documents of {index.path}")

            try:
                with ranges.open("wb") as file, texts.open("wb") as copy:
                    find_documents(index, stop, file, copy if index.copied else None, advance)
                    for written in (file, copy):
                        written.flush()
                        os.fsync(written.fileno())
                index.ranges = _put(ranges, self._path(index, "ranges"), whole)
                if index.copied:
                    index.texts = _put(texts, self._path(index, "texts"), sample)
                write_whole(self._path(index, "json"), _record(index.model_dump()))
            finally:
                for temporary in (ranges, texts):
                    temporary.unlink(missing_ok=True)
            return index

    def _report(self, what: str) -> None:
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            logger.info(what[0].upper() + what[1:])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EROFS,
                errno.EACCES,
                errno.EPERM,
                errno.ENOTDIR,
            ):
                raise
            if error.filename is not None and not str(error.filename).startswith(str(self.folder)):
                raise  # an input
            raise UserError(
                f"{self.key}: can't write to {self.folder}: {error.strerror}. Name a "
                "folder with space, or tokenize "
                "the files ahead (torchtitan tokenize), which needs none"
            ) from error


def _record(content: Any) -> bytes:
    """JSON that may hold paths which are not UTF-8; pydantic's refuses them."""
    return json.dumps(content).encode()


@dataclass(frozen=True)
class Kept:
    """A file of the cache, to be opened as a data file."""

    path: str
    about: KeptFile
    hash: Callable[[int], str]
    """Makes `about.sum` of the open file."""

    def check(self, handle: int) -> None:
        """
        Raises:
            DataError: it isn't what was written.
        """
        now = os.fstat(handle)
        if self._has_kept(now):
            return
        if now.st_size != self.about.size or self.hash(handle) != self.about.sum:
            raise changed(self.path)

    def is_sound(self) -> bool:
        """Whether it is what was written; opened only if time or inode is another."""
        try:
            if not self._has_kept(os.stat(self.path)):
                os.close(data_handle(self.path, self))
        except (OSError, DataError):
            return False
        return True

    def _has_kept(self, now: os.stat_result) -> bool:
        about = self.about
        return (about.size, about.mtime_ns, about.inode) == (
            now.st_size,
            now.st_mtime_ns,
            now.st_ino,
        )


def _put(temporary: Path, path: Path, hash: Callable[[int], str]) -> KeptFile:
    """Give a file that was written its name."""
    with open_data(temporary) as file:
        handle = file.fileno()
        status = os.fstat(handle)
        about = KeptFile(
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            sum=hash(handle),
        )
    temporary.replace(path)
    return about


@contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Take the lock, which ends with the process: yields an ending for temporary files, None if
    another has it.

    On a file system without locks every process does the work, in files of its own.
    """
    with path.open("ab") as file:
        ending = "tmp"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:
            ending = f"{socket.gethostname()}.{os.getpid()}.tmp"
        if os.fstat(file.fileno()).st_nlink == 0:  # the last holder has just removed it
            yield None
            return
        try:
            yield ending
        finally:
            path.unlink(missing_ok=True)


def open_cache(folder: str | None, key: str) -> Cache | None:
    """The cache in `folder` (None: the default); None for "none"."""
    if folder == "none":
        return None
    return Cache(Path(folder).expanduser() if folder else default_folder(), key)
