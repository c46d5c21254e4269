"""JSON files that others wrote."""

import json
from pathlib import Path
from typing import Any

_LARGEST = 256 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: it can't be read, or is a device or a pipe, which might never end.
        ValueError: it is too large, nested too deeply, or not a JSON object; the message names the file.
    """
    if not path.is_file() and path.exists():
        raise OSError(f"{path} is not a regular file")
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path} has more than {_LARGEST >> 20} MiB")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
