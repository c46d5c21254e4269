"""Which files a path names, and their bytes: decompressed in sequence, or at any place."""

import bz2
import gzip
import io
import lzma
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from torchtitan.data.retry import DataError
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger
from torchtitan.utils.patterns import TooManyEntriesError, matching_files
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

_ABOUT = ("readme", "license", "licence", "copying", "notice", "changelog", "citation", "contributing", "security")
"""Beginnings of the names of files about a folder, which are no documents of it."""
_DESCRIPTIONS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "croissant.json", "state.json"}


def find_files(path: str | Sequence[str], key: str) -> list[Path]:
    """The files that `path` names: a file, folder or glob, or several of them. Sorted within each.

    Raises:
        UserError: there are none.
    """
    if not isinstance(path, str):
        return [file for one in path for file in find_files(one, key)]
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        found = sorted(p for p in _files_below(expanded) if format_of(p))
    else:
        try:
            found = [Path(p) for p in sorted(set(matching_files(expanded, _MOST_ENTRIES)))]
        except TooManyEntriesError as error:
            raise UserError(f"{key}: {error}; name a folder closer to the files") from None
    if not found:
        raise UserError(f"{key}: no file matches {path!r} (looked for {', '.join(FORMATS)} and .bin token files)")
    return found


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


_FORMATS_READ = f"files must be of {', '.join(FORMATS)} (also {', '.join(COMPRESSED)})"


def _files_below(folder: str) -> list[Path]:
    """Files in a folder and its subfolders, except hidden ones."""
    files = []
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
        if len(files) > _MOST_ENTRIES:
            raise UserError(f"{folder} holds more than {_MOST_ENTRIES:,} files; name a folder closer to the documents")
    return files


def _is_description(file: Path) -> bool:
    name = file.name.lower()
    return name in _DESCRIPTIONS or (FORMATS.get(file.suffix.lower()) == "text" and name.startswith(_ABOUT))


def format_of(file: Path) -> Format | None:
    """What a file's name says it holds, compressed or not."""
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return FORMATS.get(Path(name).suffix)


def is_compressed(file: Path) -> bool:
    return file.name.lower().endswith(COMPRESSED)


def open_plain(file: Path, advance: Callable[[int], None] | None = None) -> IO[bytes]:
    """The bytes of a file, decompressed by the ending of its name.

    Args:
        advance: called with numbers of bytes that were read, before they are decompressed.
    """
    raw = cast(IO[bytes], io.BufferedReader(_Counted(file, advance), _BUFFER) if advance else file.open("rb"))
    ending = file.suffix.lower()
    if ending == ".zst":
        import pyarrow

        return cast(IO[bytes], io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _BUFFER))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(IO[bytes], openers[ending](raw) if ending in openers else raw)


class _Counted(io.FileIO):
    """A file that tells how much was read of it."""

    def __init__(self, file: Path, advance: Callable[[int], None]):
        super().__init__(file)
        self.advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


def is_damage(error: BaseException) -> bool:
    """Whether reading failed because a compressed file is damaged or cut off, not because a disk did."""
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return error.errno is None
    return isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile)


@dataclass(frozen=True)
class FileStamp:
    """What changes when a file does."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        status = path.stat()
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns)


class EndOfFileError(OSError):
    """A file ends before what was to be read."""


class OpenFiles:
    """Reads anywhere in many files, of which the last used stay open. Not memory-mapped: a failing disk would kill the
    process."""

    def __init__(self, most: int = 128):
        self.most = most
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, start: int, size: int, stamp: FileStamp | None = None) -> bytes:
        """`size` bytes from `start` on.

        Args:
            stamp: what the file was when its contents were indexed.

        Raises:
            OSError: it can't be read, or ends before.
            DataError: it has changed since `stamp`.
        """
        with self._lock:
            handle = self._open.pop(path, None)
            if handle is None:
                handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                status = os.fstat(handle)
                if stamp is not None and (status.st_size, status.st_mtime_ns) != (stamp.size, stamp.mtime_ns):
                    os.close(handle)
                    raise DataError(f"{path} has changed since the run indexed it; start the run again")
                while len(self._open) >= self.most:
                    os.close(self._open.popitem(last=False)[1])
            self._open[path] = handle
            parts = []
            while size:
                part = os.pread(handle, min(size, 2**30), start)  # Linux reads at most 2 GiB at once
                if not part:
                    raise EndOfFileError(f"{path} ends before byte {start + size} (truncated?)")
                parts.append(part)
                start, size = start + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


def listing(files: Sequence[Path]) -> str:
    """Names and sizes, of which a fingerprint is made: files may move."""
    return "".join(f"{file.name}:{file.stat().st_size};" for file in files)
