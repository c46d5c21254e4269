"""The cache folder that keeps the indexes of files from run to run.

    <key>.ranges  first byte and end of each sound document, two int64
    <key>.texts   a copy of the texts, only of a file without random access
    <key>.json    the `FileIndex`; written last: if it exists, the others are complete

Keys are hashes of the files' paths, sizes and times and of the column. Any number of processes
share a folder: each makes the indexes that no other process is making, and waits for the others.

`<key>.json` has the size, time, inode and hash of the first two. If their time or inode differs,
their contents are compared with the hash: all of `.ranges`, samples of `.texts`. A file is indexed
again if the hash differs.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan.data.read.index import (
    RANGE_BYTES,
    CachedFile,
    FileIndex,
    find_documents,
    key_of,
    new_index,
)
from torchtitan.data.read.opening import (
    DataError,
    FileStamp,
    full_hash,
    is_compressed,
    open_data,
    open_plain,
    sample_hash,
)
from torchtitan.data.read.records import Conversations
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import read_regular, user_cache, write_whole
from torchtitan.utils.limits import CACHE_RECORD_BYTES
from torchtitan.utils.logging import logger
from torchtitan.utils.signals import Stopped, check_stop
from torchtitan.utils.wording import listed, plural, show_size

_CANT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_REPORT_SECONDS = 10.0
_WAIT_SECONDS = 0.2
_MEAN_DOCUMENT_BYTES = 2000
"""Assumed mean size of a document in bytes (for the disk estimate)."""
_TABLE_RATIO = 4
"""Assumed compression ratio of Parquet and Arrow (for the disk estimate)."""
_MEASURED_BYTES = 2**28
"""Maximum number of bytes to decompress for the disk estimate."""
_TEMPORARY = "tmp"
"""Ending of a file that its writer has locked."""


def cache_path(folder: str | None, key: str) -> Path:
    """The path of the cache: `folder`, or else `$TORCHTITAN_CACHE`, or `torchtitan` in the user's
    cache folder.

    Args:
        key: the configuration key that names the folder.

    Raises:
        UserError: the user has no home.
    """
    folder = folder or user_cache()
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise cache_error(key, folder, str(error)) from None


class IndexCache:
    """The indexes of files in the cache folder: makes and finds them."""

    def __init__(self, folder: Path, key: str, chat: Conversations | None = None):
        """
        Args:
            key: the configuration key that sets the folder, for messages.
            chat: the documents are conversations.
        """
        self.folder = folder
        self.key = key
        self.chat = chat
        self._template = chat.fingerprint if chat else ""
        self._reported = time.monotonic()

    def _path(self, index: FileIndex, ending: str) -> Path:
        return self.folder / f"{index.key}.{ending}"

    def open(self, stamps: Sequence[FileStamp], column: str, stop: bool) -> list[FileIndex]:
        """The indexes of files; makes what the cache lacks.

        Raises:
            UserError: the folder can't be written to, or has too little space.
            DataError: a file can't be read, or has a bad document and `stop` is set.
        """
        with self._errors(stamps):
            self.folder.mkdir(parents=True, exist_ok=True)
            drafts = [new_index(stamp, column, self._template) for stamp in stamps]
            by_key = {draft.key: draft for draft in drafts}
            complete = {key: index for key, draft in by_key.items() if (index := self._read(draft))}
            if new_indexes := [draft for key, draft in by_key.items() if key not in complete]:
                self._warn_of_damage(new_indexes)
                self._remove_leftovers()
                self._announce(new_indexes)
                self._index_all(new_indexes, complete, stop)
        return [complete[draft.key] for draft in drafts]

    def _read(self, new: FileIndex) -> FileIndex | None:
        """The index of a file, if it was made."""
        try:
            # Not by pydantic's parser, which refuses paths that are not UTF-8.
            content = json.loads(read_regular(self._path(new, "json"), CACHE_RECORD_BYTES))
            index = FileIndex.model_validate(content)
        except (OSError, ValueError, RecursionError):
            return None
        return self._if_current(index, new.stamp)

    def _if_current(self, index: FileIndex, stamp: FileStamp) -> FileIndex | None:
        """`index`; None if it is of another file, or its files have changed."""
        if index.ranges is None or (index.copied and index.texts is None):
            return None
        size = index.documents * RANGE_BYTES
        if index.key != key_of([stamp], index.column, index.chat) or index.ranges.size != size:
            return None
        if index.inode != stamp.inode:
            index = index.model_copy(update={"inode": stamp.inode})
            try:
                with open_data(stamp.path, stamp) as file:
                    if sample_hash(file.fileno()) != index.sample:
                        return None
            except (OSError, DataError):
                return None
        files = index.cache_files(self.folder).values()
        return index if all(file.is_current() for file in files) else None

    def _warn_of_damage(self, new_indexes: Sequence[FileIndex]) -> None:
        if stale := [index for index in new_indexes if self._path(index, "json").exists()]:
            logger.warning(
                f"{self.folder}: what was kept of {plural(len(stale), 'file')} was changed or "
                f"deleted; indexing again: {listed((index.path for index in stale), 6)}"
            )

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed had begun to write."""
        for file in self.folder.glob("[0-9a-f]*.tmp"):
            with _locked(self.folder / f"{file.name.partition('.')[0]}.lock") as ending:
                if ending == _TEMPORARY:
                    file.unlink(missing_ok=True)

    def _announce(self, new_indexes: Sequence[FileIndex]) -> None:
        """Log the size and place of the new indexes.

        Raises:
            UserError: the folder has too little space for it.
        """
        copied = [index for index in new_indexes if index.copied]
        compressed = [index for index in copied if is_compressed(Path(index.path))]
        tables = [index for index in copied if index.kind in ("parquet", "arrow")]
        size = _total(new_indexes) // _MEAN_DOCUMENT_BYTES * RANGE_BYTES
        size += _total(copied) + (_TABLE_RATIO - 1) * _total(tables)
        if compressed:
            largest = max(compressed, key=lambda index: index.size)
            size += round((_compression_ratio(largest) - 1) * _total(compressed))
        free = shutil.disk_usage(self.folder).free
        what = f"a copy of the texts of {plural(len(copied), 'file')} and " if copied else ""
        logger.info(
            f"Indexing {plural(len(new_indexes), 'file')} "
            f"({show_size(_total(new_indexes))}) once: {what}the documents' positions "
            f"go to {self.folder}, about {show_size(size)} of {show_size(free)} free there. Set "
            f"{self.key} to use another folder"
        )
        if _total(compressed) > free:
            raise UserError(
                f"{self.key}: {self.folder} has {show_size(free)} free, too little for {what}the "
                f"documents' positions: about {show_size(size)}. Name a folder with more space, or "
                "tokenize the files ahead (torchtitan tokenize), which needs no copy"
            )
        if size > free:
            logger.warning(
                f"{self.key}: {self.folder} may be too small for about {show_size(size)}"
            )

    def _index_all(
        self, new_indexes: Sequence[FileIndex], complete: dict[str, FileIndex], stop: bool
    ) -> None:
        queue = list(new_indexes)
        while queue:
            before = len(queue)
            for index in list(queue):
                so_far = f"{len(new_indexes) - len(queue)} of {plural(len(new_indexes), 'file')}"
                result = self._index(index, stop, so_far)
                if result is not None:
                    complete[index.key] = result
                    queue.remove(index)
            if len(queue) == before:
                what = f"{plural(len(queue), 'file')}, such as {queue[0].path}"
                self._report(f"waiting for other processes to index {what}")
                check_stop()
                time.sleep(_WAIT_SECONDS)

    def _index(self, index: FileIndex, stop: bool, so_far: str) -> FileIndex | None:
        """Index a file; None if another process is indexing it."""
        with _locked(self.folder / f"{index.key}.lock") as ending:
            if ending is None:
                return None
            if complete := self._read(index):
                return complete
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
                    find_documents(
                        index,
                        stop,
                        file,
                        copy if index.copied else None,
                        advance=advance,
                        chat=self.chat,
                    )
                    for stream in (file, copy):
                        stream.flush()
                        os.fsync(stream.fileno())
                index.ranges = _finalize(ranges, self._path(index, "ranges"), full_hash)
                if index.copied:
                    index.texts = _finalize(texts, self._path(index, "texts"), sample_hash)
                content = json.dumps(index.model_dump()).encode()
                write_whole(self._path(index, "json"), content)
            except Stopped:
                logger.info(
                    f"Stopped while indexing {index.path}, which the next start reads again; "
                    "indexes of whole files are kept"
                )
                raise
            finally:
                for temporary in (ranges, texts):
                    temporary.unlink(missing_ok=True)
            return index

    def _report(self, what: str) -> None:
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            logger.info(what[0].upper() + what[1:])

    @contextmanager
    def _errors(self, inputs: Sequence[FileStamp]) -> Iterator[None]:
        """Distinguish errors of writing the cache from errors of reading the data."""
        try:
            yield
        except OSError as error:
            path = error.filename and os.path.abspath(os.fsdecode(error.filename))
            of_input = path in {stamp.path for stamp in inputs}
            if of_input or (path is None and error.errno not in _CANT_WRITE):
                raise
            raise cache_error(self.key, self.folder, error.strerror) from error


def _total(indexes: Sequence[FileIndex]) -> int:
    return sum(index.size for index in indexes)


def _compression_ratio(index: FileIndex) -> float:
    """Bytes for each byte of a compressed file, measured on the first that are read at once; 1 if
    they are damaged, which indexing reports.
    """
    reads: list[int] = []
    size = 0
    count = lambda size: reads.extend([size] if size else [])  # noqa: E731
    with suppress(Exception), open_plain(Path(index.path), count, index.stamp) as content:
        while len(reads) < 2 and size < _MEASURED_BYTES and (block := content.read(2**20)):
            size += len(block)
    return size / reads[0] if size else 1.0


def cache_error(key: str, folder: Path | str, problem: str | None) -> UserError:
    """The error about a cache folder that can't be used.

    Args:
        key: the configuration key that sets the folder.
    """
    return UserError(
        f"{key}: can't write to {folder}, which keeps the index of the data: {problem}. Set {key}, "
        "or the environment variable TORCHTITAN_CACHE, to a folder with space that can be written "
        'to, or set the key to "none"; or tokenize the files ahead (torchtitan tokenize)'
    )


def _finalize(temporary: Path, path: Path, hash: Callable[[int], str]) -> CachedFile:
    """Give a complete file its final name."""
    with open_data(temporary) as file:
        handle = file.fileno()
        status = os.fstat(handle)
        cached = CachedFile(
            size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino, sum=hash(handle)
        )
    temporary.replace(path)
    return cached


@contextmanager
def _locked(path: Path) -> Iterator[str | None]:
    """Hold the lock, which ends with the process.

    Yields:
        An ending for temporary files; None if another process has the lock. On a file system
        without locks, every process does the work in its own files.
    """
    with path.open("ab") as file:
        ending = _TEMPORARY
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
