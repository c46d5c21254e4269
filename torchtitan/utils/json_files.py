"""JSON files that others wrote."""

import json
from pathlib import Path
from typing import Any

from torchtitan.utils.files import read_regular

_LARGEST = 256 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: it can't be read, is too large, or is not a regular file.
        ValueError: it is nested too deeply, or not a JSON object; the message names the file.
    """
    try:
        content = json.loads(read_regular(path, _LARGEST, links=True).decode())
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
