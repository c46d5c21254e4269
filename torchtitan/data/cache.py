"""The cache folder of local files: what `index` finds out about each, kept from run to run.

<key>.ranges        first byte of each sound document and the one after its last, two int64 each
<key>.texts         a copy of the texts, only of a file that can't be read at any place
<key>.json          what the file holds (`FileIndex`); written last, so the others are complete if it exists
<key>.corpus.json   the same of all files of a source, so that a run opens thousands of files by reading one

Keys are hashes of the files' paths, sizes and times and of the column. Any number of processes share a folder: each
makes the index of a file that no other is making, and waits for those of the others.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from torchtitan.data.files import FileStamp, is_compressed
from torchtitan.data.index import RANGE, FileIndex, find_documents, key_of, new_index
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import write_whole
from torchtitan.utils.logging import logger
from torchtitan.utils.text import plural

_REPORT_SECONDS = 10.0
_WAIT_SECONDS = 0.2
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
        self.folder, self.key = folder, key
        self._reported = time.monotonic()

    def ranges(self, index: FileIndex) -> str:
        return str(self.folder / f"{index.key}.ranges")

    def texts(self, index: FileIndex) -> str:
        return str(self.folder / f"{index.key}.texts")

    def open(self, stamps: Sequence[FileStamp], column: str, stop: bool) -> list[FileIndex]:
        """The indexes of files, made where they are missing.

        Raises:
            UserError: the folder can't be written to, or has too little space.
            DataError: a file can't be read, or has a bad document and `stop` is set.
        """
        corpus = self.folder / f"{key_of(stamps, column)}.corpus.json"
        if (complete := self._read_corpus(corpus)) is not None:
            return complete
        with self._errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            todo = {index.key: index for index in (new_index(stamp, column) for stamp in stamps)}
            order = list(todo)
            done = {key: known for key in order if (known := self._read(key))}
            if missing := [todo[key] for key in order if key not in done]:
                self._announce(missing)
                self._make_all(missing, done, stop)
            found = [done[key] for key in order]
            with _locked(corpus.with_suffix(".lock")) as ending:
                if ending is not None:  # else another writes the same
                    write_whole(corpus, json.dumps([index.model_dump() for index in found]).encode())
        return found

    def _read_corpus(self, corpus: Path) -> list[FileIndex] | None:
        try:
            names = {entry.name for entry in os.scandir(self.folder)}
            if corpus.name not in names:
                return None
            found = [FileIndex.model_validate(index) for index in json.loads(corpus.read_bytes())]
        except (OSError, ValueError):
            return None
        return found if all(f"{index.key}.ranges" in names for index in found) else None

    def _read(self, key: str) -> FileIndex | None:
        try:
            index = FileIndex.model_validate_json((self.folder / f"{key}.json").read_bytes())
        except (OSError, ValidationError):
            return None
        sound = os.path.isfile(self.ranges(index)) and (not index.copied or os.path.isfile(self.texts(index)))
        return index if sound else None

    def _announce(self, missing: Sequence[FileIndex]) -> None:
        """Say what is going to be written, and where."""
        copied = [index for index in missing if index.copied]
        texts = sum(index.size * (1 if index.kind == "array" else _COMPRESSION) for index in copied)
        size = texts + sum(index.size // _DOCUMENT * RANGE for index in missing)
        free = shutil.disk_usage(self.folder).free
        what = f"a copy of the texts of {plural(len(copied), 'file')} and " if copied else ""
        logger.info(
            f"Indexing {plural(len(missing), 'file')} ({gigabytes(sum(index.size for index in missing))}) once: {what}"
            f"the documents' positions go to {self.folder}, about {gigabytes(size)} of {gigabytes(free)} free there. "
            f"{self.key} names another place"
        )
        if sum(index.size for index in copied if is_compressed(Path(index.path))) > free:
            raise UserError(
                f"{self.key}: {self.folder} has {gigabytes(free)} free, too little for {what}the documents' positions: "
                f"about {gigabytes(size)}. Name a folder with more space, or tokenize the files ahead (torchtitan "
                "tokenize), which needs no copy"
            )
        if size > free:
            logger.warning(f"{self.key}: {self.folder} may be too small for about {gigabytes(size)}")

    def _make_all(self, missing: Sequence[FileIndex], done: dict[str, FileIndex], stop: bool) -> None:
        left = list(missing)
        while left:
            before = len(left)
            for index in list(left):
                found = self._make(index, stop, f"{len(missing) - len(left)} of {plural(len(missing), 'file')}")
                if found is not None:
                    done[index.key] = found
                    left.remove(index)
            if len(left) == before:
                self._report(f"waiting for other processes to index {plural(len(left), 'file')}, as {left[0].path}")
                time.sleep(_WAIT_SECONDS)

    def _make(self, index: FileIndex, stop: bool, so_far: str) -> FileIndex | None:
        """The index of a file; None if another process is making it."""
        with _locked(self.folder / f"{index.key}.lock") as ending:
            if ending is None or (found := self._read(index.key)):
                return None if ending is None else found
            index = index.model_copy(deep=True)
            ranges, texts = (Path(f"{name}.{ending}") for name in (self.ranges(index), self.texts(index)))
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
                ranges.replace(self.ranges(index))
                if index.copied:
                    texts.replace(self.texts(index))
                write_whole(self.folder / f"{index.key}.json", index.model_dump_json().encode())
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
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
                raise
            if error.filename is not None and not str(error.filename).startswith(str(self.folder)):
                raise  # an input
            raise UserError(
                f"{self.key}: can't write to {self.folder}: {error.strerror}. Name a folder with space, or tokenize "
                "the files ahead (torchtitan tokenize), which needs none"
            ) from error


@contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Take the lock, which ends with the process: yields an ending for temporary files, None if another has it.

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


def gigabytes(size: float) -> str:
    """`12.3 GB`, `4.5 MB`: in the unit that fits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def open_cache(folder: str | None, key: str) -> Cache | None:
    """The cache in `folder` (None: the default); None for "none"."""
    if folder == "none":
        return None
    return Cache(Path(folder).expanduser() if folder else default_folder(), key)
