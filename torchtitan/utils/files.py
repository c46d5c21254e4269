"""Atomic writes of files."""

import os
from pathlib import Path


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
