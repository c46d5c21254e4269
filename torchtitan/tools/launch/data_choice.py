"""Data for a new project: built-in names, local files, or data sets of the hub."""

import os
import re
from dataclasses import dataclass

from torchtitan.data.read.files import find_text_files, find_token_files
from torchtitan.utils.errors import ConfigError, UserError, did_you_mean
from torchtitan.utils.storage import path_argument

_BUILT_IN = {
    "demo": ("demo_validation", "the text of Python's standard library"),
    "c4": ("c4_validation", "C4 (English), streamed from the hub"),
}
"""Built-in training sets: their validation sets and descriptions."""
_DOCUMENT = 4000
"""Assumed mean document size in bytes, for files of many documents."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.-]+)?")


@dataclass(frozen=True)
class DataChoice:
    """Data to train on."""

    dataset: str
    path: str | None = None
    held_out: str | None = None
    """Value of `validation.dataset`; None if nothing is held out."""
    held_out_path: str | None = None
    kind: str = ""
    """Description in words."""
    is_here: bool = True
    """Whether this machine has the data."""
    corpus: str | None = None
    """Input of `torchtitan tokenizer` and `tokenize`; None for streams and token files."""
    size: int | None = None
    """Size of the corpus in bytes; None if unknown."""
    documents: int | None = None
    """Estimated number of documents in the corpus."""


def find_data(text: str) -> DataChoice:
    """Find data by built-in name, path, or `org/name:config@split`.

    Raises:
        UserError: there is no such data, or it can't be read.
    """
    if text in _BUILT_IN:
        held_out, kind = _BUILT_IN[text]
        corpus = text if text == "demo" else None
        return DataChoice(text, held_out=held_out, kind=kind, corpus=corpus, size=0)
    path = str(path_argument(text, "--data"))
    if os.path.isabs(path) and not _is_pattern(path) and not os.path.exists(path):
        corpus = None if path.endswith((".bin", ".idx")) else path
        return DataChoice(
            _dataset_name(path), path, kind="local files", is_here=False, corpus=corpus
        )
    if os.path.exists(path) or text.startswith((".", "/", "~")) or _is_pattern(text):
        return _local_data(os.path.abspath(path))
    if _HUB.fullmatch(text):
        return DataChoice(text, kind="streamed from the Hugging Face hub")
    raise ConfigError(
        [
            f"--data: {text!r} is no file or folder here; give one, {', '.join(_BUILT_IN)}, "
            "or a data set of the Hugging Face hub as org/name:config@split"
            f"{did_you_mean(text, _BUILT_IN)}"
        ]
    )


def _is_pattern(path: str) -> bool:
    return re.search(r"[*?\[]", path) is not None


def _dataset_name(path: str) -> str:
    """A data set's name for local files, different from built-in names."""
    name = (
        re.sub(r"\W+", "_", os.path.basename(path.rstrip("/")).partition(".")[0]).strip("_")
        or "files"
    )
    return f"my_{name}" if name in _BUILT_IN else name


def _local_data(path: str) -> DataChoice:
    name = _dataset_name(path)
    try:
        if find_token_files(path, "--data"):
            kind = "token files, for the tokenizer that they were made with"
            held_out_folder = f"{path.rstrip('/')}-held-out"  # as `torchtitan tokenize` names it
            held_out = held_out_folder if os.path.isdir(held_out_folder) else None
            return DataChoice(name, path, name if held_out else None, held_out, kind=kind)
        files = find_text_files(path, "--data")
    except UserError as error:
        raise ConfigError([str(error)]) from None
    sizes = [file.stat().st_size for file in files]
    documents = sum(
        1 if {".txt", ".md"} & set(file.suffixes) else 1 + size // _DOCUMENT
        for file, size in zip(files, sizes, strict=True)
    )
    return DataChoice(
        name, path, kind="local files", corpus=path, size=sum(sizes), documents=documents
    )
