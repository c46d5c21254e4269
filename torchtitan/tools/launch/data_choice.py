"""The data that a project can start with."""

import os
import re
from dataclasses import dataclass

from torchtitan.data.read.files import find_text_files, find_token_files
from torchtitan.utils.errors import ConfigError, UserError, did_you_mean

_HELD_OUT = {"demo": "demo_validation", "c4": "c4_validation"}
"""Names of data to those of their held-out parts."""
_DOCUMENT = 4000
"""Bytes of a document in a file of many; an estimate."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?")


@dataclass(frozen=True)
class Data:
    """What to train on."""

    dataset: str
    path: str | None = None
    held_out: str | None = None
    """The part to validate on, as `validation.dataset`."""
    held_out_path: str | None = None
    kind: str = ""
    """In words."""
    is_here: bool = True
    """Whether this machine has it."""
    corpus: str | None = None
    """What `torchtitan tokenizer` and `tokenize` read; None: it is streamed, or tokens already."""
    size: int | None = None
    """Bytes of the corpus; None if unknown."""
    documents: int | None = None
    """About so many documents of the corpus."""


def find_data(text: str) -> Data:
    """The data that a name, a path, or `org/name:config@split` names.

    Raises:
        UserError: there is none, or nothing in it can be read.
    """
    if text in _HELD_OUT:
        kinds = {
            "demo": "the text of Python's standard library",
            "c4": "C4 (English), streamed from the hub",
        }
        corpus = text if text == "demo" else None
        return Data(text, held_out=_HELD_OUT[text], kind=kinds[text], corpus=corpus, size=0)
    path = os.path.expanduser(text)
    if os.path.isabs(path) and not _is_pattern(path) and not os.path.exists(path):
        corpus = None if path.endswith((".bin", ".idx")) else path
        return Data(_name(path), path, kind="local files", is_here=False, corpus=corpus)
    if os.path.exists(path) or text.startswith((".", "/", "~")) or _is_pattern(text):
        return _local(os.path.abspath(path))
    if _HUB.fullmatch(text):
        return Data(text, kind="streamed from the Hugging Face hub")
    raise ConfigError(
        [
            f"--data: {text!r} is no file or folder here; give one, {', '.join(_HELD_OUT)}, or a "
            "data set of the Hugging Face hub as "
            f"org/name:config@split{did_you_mean(text, _HELD_OUT)}"
        ]
    )


def _is_pattern(path: str) -> bool:
    return re.search(r"[*?\[]", path) is not None


def _name(path: str) -> str:
    """A name for files, which is none that the project knows."""
    name = (
        re.sub(r"\W+", "_", os.path.basename(path.rstrip("/")).partition(".")[0]).strip("_")
        or "files"
    )
    return f"my_{name}" if name in _HELD_OUT else name


def _local(path: str) -> Data:
    name = _name(path)
    try:
        if find_token_files(path, "--data"):
            kind = "token files, for the tokenizer that they were made with"
            beside = f"{path.rstrip('/')}-held-out"  # as `torchtitan tokenize` names it
            held_out = beside if os.path.isdir(beside) else None
            return Data(name, path, name if held_out else None, held_out, kind=kind)
        files = find_text_files(path, "--data")
    except UserError as error:
        raise ConfigError([str(error)]) from None
    sizes = [file.stat().st_size for file in files]
    documents = sum(
        1 if {".txt", ".md"} & set(file.suffixes) else 1 + size // _DOCUMENT
        for file, size in zip(files, sizes, strict=True)
    )
    return Data(name, path, kind="local files", corpus=path, size=sum(sizes), documents=documents)
