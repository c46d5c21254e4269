"""The data that a project can start with."""

import os
import re
from dataclasses import dataclass

from torchtitan.data.files import find_files, find_text_files
from torchtitan.data.sources import token_files
from torchtitan.utils.errors import ConfigError, UserError, did_you_mean

_HELD_OUT = {"demo": "demo_validation", "c4": "c4_validation"}
"""Names of data to those of their held-out parts."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?")


@dataclass(frozen=True)
class Data:
    """What to train on."""

    dataset: str
    path: str | None = None
    held_out: str | None = None
    """The part to validate on."""
    kind: str = ""
    """In words."""


def find_data(text: str) -> Data:
    """The data that a name, a path, or `org/name:config@split` names.

    Raises:
        UserError: there is none, or nothing in it can be read.
    """
    if text in _HELD_OUT:
        kinds = {"demo": "the text of Python's standard library", "c4": "C4 (English), streamed from the hub"}
        return Data(text, held_out=_HELD_OUT[text], kind=kinds[text])
    path = os.path.expanduser(text)
    if os.path.exists(path) or text.startswith((".", "/", "~")) or re.search(r"[*?\[]", text):
        return _local(os.path.abspath(path))
    if _HUB.fullmatch(text):
        return Data(text, kind="streamed from the Hugging Face hub")
    raise ConfigError(
        [
            f"--data: {text!r} is no file or folder here; give one, {', '.join(_HELD_OUT)}, or a data set of the "
            f"Hugging Face hub as org/name:config@split{did_you_mean(text, _HELD_OUT)}"
        ]
    )


def _local(path: str) -> Data:
    name = re.sub(r"\W+", "_", os.path.basename(path.rstrip("/")).partition(".")[0]).strip("_") or "files"
    if name in _HELD_OUT:
        name = f"my_{name}"
    tokens = token_files(path)
    try:
        if tokens:
            find_files(tokens, "--data")
        else:
            find_text_files(path, "--data")
    except UserError as error:
        raise ConfigError([str(error)]) from None
    kind = "token files, for the tokenizer that they were made with" if tokens else "local files"
    return Data(name, path, kind=kind)
