"""Atomic writes, and reads of regular files of limited size."""

import codecs
import errno
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from torchtitan.utils.errors import UserError
from torchtitan.utils.storage import is_remote
from torchtitan.utils.wording import listed

_PIECE = 2**20
"""Number of bytes to read at once."""
_STALE_SECONDS = 3600
"""Age from which a temporary file is abandoned."""
_POINTER = b"version https://git-lfs.github.com/spec/v1"
_POINTER_BYTES = 1024
"""A pointer is smaller, by git-lfs's specification."""


def write_whole(path: Path, data: bytes) -> None:
    """Write `path` atomically: to a temporary file, synced to disk, then renamed."""
    write_all({path: data})


def write_all(files: Mapping[Path, bytes]) -> None:
    """Write several files; none changes until all are synced to disk under temporary names."""
    # random: containers on several nodes number their processes alike
    temporary = {path: path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in files}
    try:
        for path, data in files.items():
            with temporary[path].open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for path, draft in temporary.items():
            draft.replace(path)
    except BaseException:
        for draft in temporary.values():
            draft.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: bytes) -> None:
    """Append a line by a single write, since another process may append, too. If it doesn't fit on
    the disk, the file stays unchanged.

    Raises:
        OSError: the line can't be written, or the file isn't regular.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        size = status.st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":  # a process was killed within a line
            line = b"\n" + line
        count = os.write(handle, line)
        if count < len(line):
            if os.fstat(handle).st_size == size + count:
                os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed in `write_all` over an hour ago."""
    for path in folder.glob(".*.????????.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def write_output(files: Mapping[Path, bytes]) -> None:
    """Write the output files of a command, and create their folders.

    Raises:
        UserError: a file can't be written.
    """
    try:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_all(files)
    except OSError as error:
        raise UserError(f"can't write {listed(files, 4)}: {error.strerror or error}") from None


def open_regular(path: Path, *, links: bool = False, buffered: bool = True) -> IO[bytes]:
    """Open a regular file to read its bytes. A pipe would block, and a device never end.

    Args:
        links: follow symbolic links. A checkpoint has no links; a configuration or a download may.
        buffered: read ahead; remote storage always does.

    Raises:
        OSError: see `regular_handle`.
    """
    if is_remote(path):
        return path.open("rb")
    handle = regular_handle(path, links=links)
    return cast(IO[bytes], open(handle, "rb", buffering=-1 if buffered else 0))


def regular_handle(path: str | Path, *, links: bool = False) -> int:
    """The descriptor of a regular file, opened to read it; see `open_regular`.

    Raises:
        OSError: it can't be opened, or is a folder, pipe or device, a symbolic link without
        `links`, or a pointer that git-lfs left in place of a file.
    """
    if not links and os.path.islink(path):
        raise OSError(errno.ELOOP, "is a symbolic link", str(path))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    status = os.fstat(handle)
    kind = stat.S_IFMT(status.st_mode)
    number, problem = errno.EINVAL, "not a regular file"
    if kind == stat.S_IFREG:
        if status.st_size >= _POINTER_BYTES or os.read(handle, len(_POINTER)) != _POINTER:
            os.lseek(handle, 0, os.SEEK_SET)
            return handle
        number = errno.ENODATA
        problem = "a pointer of git-lfs, not the file: run `git lfs pull` in its repository"
    elif kind == stat.S_IFDIR:
        number, problem = errno.EISDIR, os.strerror(errno.EISDIR)
    os.close(handle)
    raise OSError(number, problem, str(path))


BOM = codecs.BOM_UTF8
"""The byte order mark that some editors, such as Windows' Notepad, write in front of UTF-8 text."""


def text_of(content: bytes) -> str:
    """The text of a UTF-8 file from a person or another program, without a byte order mark.

    Raises:
        UnicodeDecodeError: it has another encoding.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnicodeDecodeError("utf-8", content, 0, 2, "it is UTF-16; save it as UTF-8")
    return content.removeprefix(BOM).decode()


def read_regular(path: Path, most: int, *, links: bool = False) -> bytes:
    """The contents of a regular file of at most `most` bytes.

    Raises:
        OSError: it can't be read, is larger, or isn't a regular file; see `open_regular`.
    """
    with open_regular(path, links=links) as file:
        content = bytearray()
        # In pieces: a read allocates as many bytes as it may return.
        while more := file.read(min(_PIECE, most + 1 - len(content))):
            content += more
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return bytes(content)


def user_cache() -> str:
    """This project's folder for files that can be recreated: `$TORCHTITAN_CACHE`, or `torchtitan`
    in the user's cache folder. It may begin with `~`.
    """
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.environ.get("TORCHTITAN_CACHE") or f"{user}/torchtitan"
