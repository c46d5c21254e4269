"""Atomic writes of files, and reads that only regular files can answer."""

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

from torchtitan.utils.storage import is_remote


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


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read its bytes. A pipe would block, a device never end, a link lead anywhere.

    Raises:
        OSError: it can't be opened, or is a symbolic link, folder, pipe or device.
    """
    if is_remote(path):
        return path.open("rb")
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link", str(path))
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(handle, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes.

    Raises:
        OSError: it can't be read, isn't a regular file, or is larger.
    """
    with open_regular(path) as file:
        content: Any = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
    return content
