"""Reading files that may be anything, finding them by a pattern, and writing them atomically."""

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path


def read_regular(path: Path, limit: int) -> bytes:
    """The contents of a regular file.

    Args:
        limit: bytes.

    Raises:
        OSError: it can't be read, is longer than `limit`, or is not a regular file; reading a pipe might never end.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)  # opening a pipe would wait for its other end
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes; at most {limit:,} are read", str(path))
        return file.read(size)


class TooManyEntriesError(Exception):
    """A pattern makes too many folders be searched, perhaps in a circle of links."""


def matching_files(pattern: str, most: int) -> Iterator[str]:
    """The files that a pattern matches, by the rules of `glob.glob(pattern, recursive=True)`, in no order.

    Args:
        most: entries of folders to look at.

    Raises:
        TooManyEntriesError: there are more.
    """
    if not _is_pattern(pattern):
        yield from [pattern] if os.path.isfile(pattern) else []
        return
    seen = 0

    def entries(folder: str, names: str) -> Iterator[os.DirEntry[str]]:
        nonlocal seen
        try:
            with os.scandir(folder or ".") as found:
                for entry in found:
                    seen += 1
                    if seen > most:
                        raise TooManyEntriesError(f"{pattern!r} searches more than {most:,} files and folders")
                    if fnmatch.fnmatch(entry.name, names) and (names.startswith(".") or not entry.name.startswith(".")):
                        yield entry
        except OSError:  # as glob: what can't be read matches nothing
            return

    parts = [part for part in re.sub(r"(\*\*/)+", "**/", pattern).split("/") if part]
    todo = [("/" if pattern.startswith("/") else "", [*parts, "*"] if parts[-1] == "**" else parts)]
    while todo:
        folder, (part, *rest) = todo.pop()
        if part == "**":
            todo += [(entry.path, [part, *rest]) for entry in entries(folder, "*") if _is(entry.is_dir)]
            todo.append((folder, rest))
        elif not _is_pattern(part):
            path = os.path.join(folder, part)
            todo += [(path, rest)] if rest else []
            yield from [path] if not rest and os.path.isfile(path) else []
        elif rest:
            todo += [(entry.path, rest) for entry in entries(folder, part) if _is(entry.is_dir)]
        else:
            yield from (entry.path for entry in entries(folder, part) if _is(entry.is_file))


def _is_pattern(name: str) -> bool:
    return re.search(r"[*?[]", name) is not None


def _is(test: Callable[[], bool]) -> bool:
    """The answer of a `DirEntry`; False for links that lead nowhere or in a circle."""
    try:
        return test()
    except OSError:
        return False


def write_whole(path: Path, data: bytes) -> None:
    """Write `path` atomically: to a temporary file, synced to disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
