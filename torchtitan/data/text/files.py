"""Which files a path names, and their bytes: decompressed in sequence, or at any place."""

import bz2
import errno
import gzip
import io
import lzma
import os
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast

from torchtitan.data.text.identity import sample
from torchtitan.data.text.retry import DataError
from torchtitan.data.text.saved_datasets import (
    in_one_split,
    saved_files,
    saved_splits,
    without_caches,
)
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import regular_handle
from torchtitan.utils.logging import logger
from torchtitan.utils.patterns import (
    TooManyEntriesError,
    files_below,
    matching_files,
    without_aliases,
)
from torchtitan.utils.text import listed, plural

Format = Literal["lines", "json", "text", "csv", "tsv", "parquet", "arrow"]
FORMATS: dict[str, Format] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".txt": "text",
    ".md": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Endings of files of documents. `json` may be lines or an array."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_BUFFER = 2**20
_MOST_ENTRIES = 1_000_000
"""Files and folders that a pattern may search. They take some seconds."""

_ABOUT = (
    "readme",
    "license",
    "licence",
    "copying",
    "notice",
    "changelog",
    "citation",
    "contributing",
    "security",
)
"""Beginnings of the names of files about a folder, which are no documents of it."""
REPORT = "-report.json"
"""End of the name of what `torchtitan tokenize` writes about token files."""
_DESCRIPTIONS = {
    "dataset_infos.json",
    "dataset_info.json",
    "dataset_dict.json",
    "croissant.json",
    "state.json",
}


def find_files(path: str | Sequence[str], key: str) -> list[Path]:
    """The files that `path` names: a file, folder or glob, or several of them. Sorted within each.

    Raises:
        UserError: there are none.
    """
    if not isinstance(path, str):
        return [file for one in path for file in find_files(one, key)]
    found = _named_by(path, key)
    expanded = os.path.expanduser(path)
    if not os.path.isfile(expanded):
        found = _of_saved(found, os.path.isdir(expanded), key)
    if os.path.isdir(expanded):
        found = [file for file in found if format_of(file)]
    if not found:
        raise UserError(
            f"{key}: no file matches {path!r} (looked for {', '.join(FORMATS)} and .bin "
            "token files)"
        )
    return found


def _of_saved(files: Sequence[Path], in_folder: bool, key: str) -> list[Path]:
    """`files` without what `save_to_disk` left beside a data set, and of a folder without splits
    other than `train`.
    """
    try:
        files, chosen = in_one_split(files) if in_folder else (files, [])
        files = without_caches(files)
    except DataError as error:
        raise UserError(f"{key}: {error}") from None
    if chosen:
        logger.info(
            f"{key}: of the saved splits, reading {listed(chosen, 6)}; name another's "
            "folder to read that"
        )
    return list(files)


def find_token_files(path: str, key: str) -> list[Path]:
    """The token files that `path` names: a `.bin` file, a glob of them, or a folder that holds
    some, at any depth.

    Of a Megatron pair the `.idx` file may be named, too.

    Returns:
        None of them if `path` names documents or doesn't exist.
    """
    folder = os.path.expanduser(path)
    if not os.path.isdir(folder):
        own = path.removesuffix(".idx") + ".bin" if path.endswith(".idx") else path
        return find_files(own, key) if own.endswith(".bin") else []
    files = set(_named_by(path, key))
    tokens = {file for file in files if file.suffix == ".bin"}
    if Path(folder) not in {file.parent for file in tokens}:  # below it may lie other binary files
        tokens = {
            file for file in tokens if {file.with_suffix(".json"), file.with_suffix(".idx")} & files
        }
    described = {file.with_suffix(".json") for file in tokens}
    beside = [file for file in files - described if format_of(file) and not _is_description(file)]
    if tokens and beside:
        names = listed(sorted(file.name for file in beside), 6)
        logger.warning(
            f"{key}: reading {plural(len(tokens), 'token file')} of {path}, and not what "
            f"lies beside: {names}. To "
            "read that, name it by itself, or as another source"
        )
    return sorted(tokens)


def _named_by(path: str, key: str) -> list[Path]:
    """The files in a folder, except hidden ones, or those that a pattern matches, each once,
    sorted.
    """
    expanded = os.path.expanduser(path)
    skipped: list[str] = []
    search = files_below if os.path.isdir(expanded) else matching_files
    try:
        files, again = without_aliases(search(expanded, _MOST_ENTRIES, skipped))
    except TooManyEntriesError as error:
        raise UserError(f"{key}: {error}; name a folder closer to the files") from None
    if links := sorted({*skipped, *again}):
        logger.info(
            f"{key}: skipping {plural(len(links), 'link')} to what is read under another "
            f"name: {listed(links, 6)}"
        )
    return sorted(map(Path, files))


def find_text_files(path: str | Sequence[str], key: str) -> list[Path]:
    """The files that `path` names, without those that a folder or glob holds beside its documents.

    Raises:
        UserError: there are none, or a file that is named by itself has an unknown format.
    """
    chosen: list[Path] = []
    ignored: list[Path] = []
    for one in [path] if isinstance(path, str) else path:
        found = find_files(one, key)
        if os.path.isfile(os.path.expanduser(one)):
            if format_of(found[0]) is None:
                raise UserError(f"{key}: {one} has an unknown format; {_FORMATS_READ}")
            chosen += found
            continue
        texts = [file for file in found if format_of(file) and not _is_description(file)]
        ignored += [file for file in found if not format_of(file) or _is_description(file)]
        chosen += texts
    if not chosen:
        names = listed(file.name for file in ignored[:4])
        where = listed([path] if isinstance(path, str) else path)
        raise UserError(f"{key}: no documents in {where}, only {names}; {_FORMATS_READ}")
    if ignored:
        kinds = listed(sorted({file.name for file in ignored}), 6)
        logger.info(f"{key}: ignoring {plural(len(ignored), 'file')} without documents: {kinds}")
    return chosen


_FORMATS_READ = (
    f"files must be of {', '.join(FORMATS)} (but for Parquet and Arrow also "
    f"{', '.join(COMPRESSED)})"
)


def path_problem(path: str) -> str | None:
    """What is wrong with the one file or folder named `path`, as far as its name and descriptions
    tell; else None.
    """
    named = Path(path).expanduser()
    if not named.is_dir():
        known = format_of(named) or named.suffix in (".bin", ".idx")
        return None if known else f"{path} has an unknown format; {_FORMATS_READ}"
    try:
        saved_splits(named)
        saved_files(named)
    except DataError as error:
        return str(error)
    return None


def _is_description(file: Path) -> bool:
    name = file.name.lower()
    if name in _DESCRIPTIONS or name.endswith(REPORT):
        return True
    return FORMATS.get(file.suffix.lower()) == "text" and name.startswith(_ABOUT)


def format_of(file: Path) -> Format | None:
    """What a file's name says it holds, compressed or not."""
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return FORMATS.get(Path(name).suffix)


def is_compressed(file: Path) -> bool:
    return file.name.lower().endswith(COMPRESSED)


class Stamp(Protocol):
    """What a file was when the run looked at it."""

    def check(self, handle: int) -> None:
        """
        Raises:
            DataError: the file that was opened is another one.
        """


@dataclass(frozen=True)
class FileStamp:
    """What changes when a file does."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    sample: str = ""
    """Of its contents. It decides if only the inode differs: file systems in user space may number
    files anew.
    """

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """The stamp of a file, without opening it.

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

    def check(self, handle: int) -> None:
        """
        Raises:
            DataError: the file has changed.
        """
        now = os.fstat(handle)
        same = (self.size, self.mtime_ns) == (now.st_size, now.st_mtime_ns)
        if not same or (self.inode != now.st_ino and self.sample != sample(handle)):
            raise changed(self.path)


def changed(path: str) -> DataError:
    """The error about a file that is no longer what it was."""
    return DataError(f"{path} has changed since the run indexed it; start the run again")


_NOT_REGULAR = (
    "is not a regular file (a pipe, device or socket?); data is only read from regular files"
)


def data_handle(path: str | Path, stamp: Stamp | None = None) -> int:
    """The descriptor of a data file, opened to read it. Every data file of this machine is opened
    by this function.

    Args:
        path: may be a link.
        stamp: what the file was when its contents were indexed.

    Raises:
        OSError: it can't be opened.
        DataError: it is not a regular file, or has changed since `stamp`.
    """
    try:
        handle = regular_handle(path, links=True)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO):  # ENXIO: a socket
            raise DataError(f"{path} {_NOT_REGULAR}") from None
        raise
    try:
        if stamp is not None:
            stamp.check(handle)
    except DataError:
        os.close(handle)
        raise
    return handle


def open_data(path: str | Path, stamp: Stamp | None = None) -> IO[bytes]:
    """The bytes of a data file; see `data_handle`."""
    return open(data_handle(path, stamp), "rb")


def open_plain(
    file: Path, advance: Callable[[int], None] | None = None, stamp: Stamp | None = None
) -> IO[bytes]:
    """The bytes of a data file, decompressed by the ending of its name; see `data_handle`.

    Args:
        advance: called with numbers of bytes that were read, before they are decompressed.
    """
    handle = data_handle(file, stamp)
    raw = io.FileIO(handle) if advance is None else _Counted(handle, advance)
    buffered = cast(IO[bytes], io.BufferedReader(raw, _BUFFER))
    ending = file.suffix.lower()
    if ending == ".zst":
        import pyarrow

        return cast(
            IO[bytes], io.BufferedReader(pyarrow.CompressedInputStream(buffered, "zstd"), _BUFFER)
        )
    openers: dict[str, Any] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".xz": lzma.open,
    }
    return cast(IO[bytes], openers[ending](buffered) if ending in openers else buffered)


class _Counted(io.FileIO):
    """A file that tells how much was read of it."""

    def __init__(self, handle: int, advance: Callable[[int], None]):
        super().__init__(handle)
        self.advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


def is_damage(error: BaseException) -> bool:
    """Whether reading failed because a compressed file is damaged or cut off, not because a disk
    did.
    """
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return error.errno is None
    return isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile)


class EndOfFileError(OSError):
    """A file ends before what was to be read."""


class OpenFiles:
    """Reads anywhere in many files, of which the last used stay open. Not memory-mapped: a failing
    disk would kill the process.
    """

    def __init__(self, most: int = 128):
        self.most = most
        self._open: OrderedDict[str, tuple[int, tuple[int, int]]] = OrderedDict()
        """Descriptors, with the size and time of the file when it was opened."""
        self._lock = threading.Lock()

    def read(
        self,
        path: str,
        start: int,
        size: int,
        stamp: Stamp | None = None,
    ) -> bytes:
        """`size` bytes from `start` on.

        Args:
            stamp: what the file was when its contents were indexed.

        Raises:
            OSError: it can't be read, or ends before.
            DataError: it is not a regular file, or has changed since `stamp`.
        """
        with self._lock:
            opened = self._open.pop(path, None)
            if opened is None:
                handle = data_handle(path, stamp)
                opened = handle, _times(handle)
                while len(self._open) >= self.most:
                    _, (oldest, _) = self._open.popitem(last=False)
                    os.close(oldest)
            self._open[path] = opened
            handle, before = opened
            parts = []
            while size:
                part = os.pread(
                    handle, min(size, 2**30), start
                )  # Linux reads at most 2 GiB at once
                if not part:
                    raise EndOfFileError(f"{path} ends before byte {start + size} (truncated?)")
                parts.append(part)
                start = start + len(part)
                size = size - len(part)
            if stamp is not None and _times(handle) != before:
                raise changed(path)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        for handle, _ in self._open.values():
            os.close(handle)


def _times(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns
