"""Atomic writes of files, and cautious reads of those that others wrote."""

import json
import os
from pathlib import Path
from typing import Any

_LARGEST_JSON = 256 * 2**20


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


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: it can't be read, or is a device or a pipe, which might never end.
        ValueError: it is too large, nested too deeply, or not a JSON object; the message names the file.
    """
    if not path.is_file() and path.exists():
        raise OSError(f"{path} is not a regular file")
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{path} has more than {_LARGEST_JSON >> 20} MiB")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
