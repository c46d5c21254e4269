"""Reads the bytes of data files: opens them safely, decompresses them in sequence or reads anywhere
in them, and retries.

A `FileStamp` shows whether a file has changed since it was indexed. Its hash is cheap: it covers
samples of a large file, at fixed offsets.
"""

import bz2
import errno
import gzip
import hashlib
import io
import lzma
import os
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from torchtitan.config.sections.data import DataLoader
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import regular_handle
from torchtitan.utils.logging import logger
from torchtitan.utils.retry import retry

T = TypeVar("T")

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_BUFFER = 2**20
_BLOCK = 2**14
_BLOCKS = 16
SAMPLED_BYTES = _BLOCK * _BLOCKS
"""Bytes that `sample_hash` reads: all of a file that isn't larger."""


class DataError(ValueError):
    """The contents of a file can't be used; the message names the file and the place."""


class BadDocument(DataError):
    """A document that can't be decoded, or has no text."""

    def __init__(self, kind: str, problem: str):
        super().__init__(problem)
        self.kind = kind
        """The kind that `run.json` counts."""

    def __reduce__(self) -> tuple[type["BadDocument"], tuple[str, str]]:
        return BadDocument, (self.kind, str(self))


@contextmanager
def data_errors(key: str) -> Iterator[None]:
    """Turn a `DataError` into a `UserError` about a configuration key."""
    try:
        yield
    except DataError as error:
        raise UserError(f"{key}: {error}") from None


def sample_hash(handle: int) -> str:
    """A hash of the size and contents of an open file; for a large file, of 16 blocks between its
    beginning and its end.
    """
    size = os.fstat(handle).st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    if size <= SAMPLED_BYTES:
        _hash_range(digest, handle, 0, size)
    else:
        for i in range(_BLOCKS):
            _hash_range(digest, handle, (size - _BLOCK) * i // (_BLOCKS - 1), _BLOCK)
    return digest.hexdigest()


def full_hash(handle: int) -> str:
    """A hash of all bytes of an open file."""
    digest = hashlib.blake2b(digest_size=8)
    _hash_range(digest, handle, 0, os.fstat(handle).st_size)
    return digest.hexdigest()


def _hash_range(digest: "hashlib.blake2b", handle: int, start: int, size: int) -> None:
    end = start + size
    while start < end:
        block = os.pread(handle, min(_BUFFER, end - start), start)
        if not block:  # cut in the meantime
            return
        digest.update(block)
        start += len(block)


@dataclass(frozen=True)
class FileStamp:
    """Properties of a file that change when the file does."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    hash: str = ""
    """Compared if only the inode differs: file systems in user space may number files anew."""
    hasher: Callable[[int], str] = sample_hash
    """Computes `hash` of the open file."""
    copies: bool = False
    """Whether a copy of the file is accepted, whose time differs too."""

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """Stamp a file without opening it.

        Raises:
            DataError: it is not a regular file, or a link to none.
            OSError: its folder can't be read.
        """
        try:
            status = path.stat()
        except FileNotFoundError:
            if path.is_symlink():
                raise DataError(
                    f"{path} is a link to {os.readlink(path)}, which doesn't exist"
                ) from None
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DataError(f"{path} is a link that leads in a circle") from None
            raise
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} {_NOT_REGULAR}")
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ino)

    def matches(self, status: os.stat_result) -> bool:
        """Whether size, time and inode are the same."""
        same_file = self.inode == status.st_ino
        return same_file and (self.size, self.mtime_ns) == (status.st_size, status.st_mtime_ns)

    def check(self, handle: int) -> None:
        """
        Raises:
            DataError: the file that was opened is another one.
        """
        now = os.fstat(handle)
        if self.matches(now):
            return
        same = self.size == now.st_size and (self.copies or self.mtime_ns == now.st_mtime_ns)
        if not same or self.hash != self.hasher(handle):
            raise changed_error(self.path)

    def is_current(self) -> bool:
        """Whether the file is unchanged; opens it only if its time or inode differs."""
        try:
            if not self.matches(os.stat(self.path)):
                os.close(data_handle(self.path, self))
        except (OSError, DataError):
            return False
        return True


def changed_error(path: str) -> DataError:
    """The error about a file that has changed since it was indexed."""
    return DataError(f"{path} has changed since the run indexed it; start the run again")


_NOT_REGULAR = (
    "is not a regular file (a pipe, device or socket?); data is only read from regular files"
)


def data_handle(path: str | Path, stamp: FileStamp | None = None) -> int:
    """The descriptor of a data file, opened to read it. All local data files are opened here.

    Args:
        path: may be a link.
        stamp: of the file when its contents were indexed.

    Raises:
        OSError: it can't be opened.
        DataError: it is not a regular file, a pointer of git-lfs, or has changed since `stamp`.
    """
    try:
        handle = regular_handle(path, links=True)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO):  # ENXIO: a socket
            raise DataError(f"{path} {_NOT_REGULAR}") from None
        if error.errno == errno.ENODATA:
            raise DataError(f"{path} is {error.strerror}") from None
        raise
    try:
        if stamp is not None:
            stamp.check(handle)
    except DataError:
        os.close(handle)
        raise
    return handle


def open_data(path: str | Path, stamp: FileStamp | None = None) -> IO[bytes]:
    """The bytes of a data file; see `data_handle`."""
    return open(data_handle(path, stamp), "rb")


def is_compressed(file: Path) -> bool:
    return file.name.lower().endswith(COMPRESSED)


def open_plain(
    file: Path, advance: Callable[[int], None] | None = None, stamp: FileStamp | None = None
) -> IO[bytes]:
    """The bytes of a data file, decompressed by the ending of its name; see `data_handle`.

    Args:
        advance: called with the number of (compressed) bytes of every read.
    """
    handle = data_handle(file, stamp)
    raw = io.FileIO(handle) if advance is None else _ReportingFile(handle, advance)
    buffered = cast(IO[bytes], io.BufferedReader(raw, _BUFFER))
    ending = file.suffix.lower()
    if ending == ".zst":
        import pyarrow

        plain = pyarrow.CompressedInputStream(buffered, "zstd")
        return cast(IO[bytes], io.BufferedReader(plain, _BUFFER))
    if ending == ".xz":
        return cast(IO[bytes], io.BufferedReader(_XZ(buffered), _BUFFER))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
    if ending in openers:
        return openers[ending](buffered)
    return buffered


class _XZ(io.RawIOBase):
    """The contents of an xz file: several streams, with padding of zeros between and after them.
    `lzma.open` reports such a file as cut off, or ignores the streams after the padding.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._decoder = lzma.LZMADecompressor()
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._decoder.eof and not self._next_stream():
                return 0
            block = b""
            if self._decoder.needs_input:
                block = self._pending or self._file.read(_BUFFER)
                self._pending = b""
                if not block:
                    raise EOFError("the file ends within a stream")
            data = self._decoder.decompress(block, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next_stream(self) -> bool:
        """Skip padding; whether another stream follows."""
        data = self._decoder.unused_data.lstrip(b"\0")
        while not data and (block := self._file.read(_BUFFER)):
            data = block.lstrip(b"\0")
        self._pending = data
        self._decoder = lzma.LZMADecompressor() if data else self._decoder
        return bool(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _ReportingFile(io.FileIO):
    """A file that reports the size of each read."""

    def __init__(self, handle: int, advance: Callable[[int], None]):
        super().__init__(handle)
        self.advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


def is_damage(error: BaseException) -> bool:
    """Whether reading failed because a compressed file is damaged, not because of the disk."""
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return error.errno is None
    return isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile)


class EndOfFileError(OSError):
    """A file ends before the bytes to read."""


class FilePool:
    """Reads anywhere in many files, and keeps the last used ones open.

    They aren't memory-mapped: a failing disk would kill the process.
    """

    def __init__(self, most: int = 128):
        self.most = most
        self._open: OrderedDict[str, tuple[int, tuple[int, int]]] = OrderedDict()
        """Descriptors, with the size and time of the file when it was opened."""
        self._lock = threading.Lock()

    def read(self, path: str, start: int, size: int, stamp: FileStamp | None = None) -> bytes:
        """`size` bytes from `start` on.

        Args:
            stamp: of the file when its contents were indexed.

        Raises:
            OSError: it can't be read, or ends before.
            DataError: it is not a regular file, or has changed since `stamp`.
        """
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is None:
                handle = data_handle(path, stamp)
                entry = handle, _times(handle)
                while len(self._open) >= self.most:
                    _, (oldest, _) = self._open.popitem(last=False)
                    os.close(oldest)
            self._open[path] = entry
            handle, before = entry
            chunks = []
            while size:
                # Linux reads at most 2 GiB at once.
                chunk = os.pread(handle, min(size, 2**30), start)
                if not chunk:
                    raise EndOfFileError(f"{path} ends before byte {start + size} (truncated?)")
                chunks.append(chunk)
                start += len(chunk)
                size -= len(chunk)
            if stamp is not None and _times(handle) != before:
                raise changed_error(path)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # A default, as modules may be gone when the interpreter exits.
        for handle, _ in self._open.values():
            close(handle)


def _times(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns


_PERMANENT_ERRORS = (ValueError, TypeError, LookupError, RecursionError, MemoryError)
"""Errors of decoding and of formats, which another attempt would repeat. One that is also an
OSError, such as a web page in place of JSON, may be transient.
"""


@dataclass
class Retry:
    """Retries the reads of one data source, with growing pauses, unless the data is damaged."""

    section: str
    """`training`, `validation`, or a table of sources below one of them."""
    source: str
    """The dataset's name or path."""
    options: DataLoader
    doing: str = field(default="opening it", init=False)
    """The read in progress, for the error about a stall."""

    def __call__(
        self, what: str, read: Callable[[], T], reset: Callable[[], None] = lambda: None
    ) -> T:
        """Return `read()`.

        Args:
            what: the part of the data to read, for messages.
            reset: undoes the changes of a failed attempt.

        Raises:
            UserError: every attempt failed, or the contents can't be decoded; or `read` raised it.
        """
        self.doing = f"reading {what}"

        target = f"{what} of {self.source}"

        def warn(error: Exception, attempt: int, pause: float) -> None:
            cause = first_line(error)
            self.doing = f"reading {what}, which failed {attempt} times ({cause})"
            logger.warning(f"{self.section}.dataset: {target}: {cause}; trying again")
            reset()

        attempts = self.options.retries + 1
        try:
            return retry(
                read,
                attempts=attempts,
                pause=self.options.retry_pause_seconds,
                may_pass=_is_transient,
                failed=warn,
            )
        except UserError:
            raise
        except Exception as error:
            cause = first_line(error)
            if _is_of_writing(error):
                raise UserError(
                    f"{self.section}.dataset: {target}: {cause}. This is not the data, but what is "
                    "kept of it on this machine: set HF_HOME and TMPDIR to folders that can be "
                    "written to and have space"
                ) from error
            if not _is_transient(error):
                raise UserError(f"{self.section}.dataset: {target}: {cause}") from error
            raise UserError(
                f"{self.section}.dataset: reading failed: {target}: {cause} ({attempts} attempts). "
                f"Repair the source, or raise {self.section.split('.')[0]}.dataloader.retries."
            ) from error


def _is_transient(error: Exception) -> bool:
    permanent = isinstance(error, _PERMANENT_ERRORS) and not isinstance(error, OSError)
    return not (isinstance(error, UserError) or permanent or _is_of_writing(error))


def _is_of_writing(error: Exception) -> bool:
    """Whether writing failed: a library caches its downloads."""
    return isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def first_line(error: BaseException | None) -> str:
    """The type of an error and the first line of its message; only the message of a `DataError`."""
    text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0]
