"""Folders that training and its tools write: runs, checkpoints, models. They hold no documents.

A folder of data may lie beside them, or above: `dataset_path = "."` beside `outputs/`. Their JSON
files would be read as documents, and grow while the run reads them. A folder is such an output if
it contains at least two of our file names, including a distinctive one.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class _Kind(NamedTuple):
    words: str
    distinctive: re.Pattern[str]
    names: re.Pattern[str]
    """All names of its files and folders whose contents look like documents."""


_KINDS = (
    _Kind(
        "run",
        re.compile(r"run\.json|metrics\.jsonl|\.lock"),
        re.compile(
            r"(run|metrics|events|expert_load|samples|evals|guard)(-[\d-]+)?\.jsonl?"
            r"|config\.toml|\.lock|checkpoint|logs|tb|wandb|mlruns|comm_traces|profile_traces"
            r"|memory_snapshot|memory_budget"
        ),
    ),
    _Kind(
        "checkpoint",
        re.compile(r"manifest\.json|__\d+\.json|\.incomplete"),
        re.compile(r"(manifest|tensors|data_files|__\d+)\.json|\.incomplete|.*\.distcp"),
    ),
    _Kind(
        "model or tokenizer",
        re.compile(r"(config|tokenizer|tokenizer_config)\.json|.*\.safetensors"),
        re.compile(
            r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens"
            r"|chat_template|vocab|params|preprocessor_config|processor_config)\.json|merges\.txt"
            r"|.*\.(safetensors|model)|.*\.(safetensors|bin)\.index\.json|pytorch_model.*\.bin"
        ),
    ),
    _Kind(
        "index cache",
        re.compile(r"[0-9a-f]{32}\.ranges"),
        re.compile(r"[0-9a-f]{32}(\.corpus\.json|\.json|\.ranges|\.texts)"),
    ),
)


class OutputFolders:
    """Leaves the files of outputs out of the files below a folder that the user named."""

    def __init__(self, base: Path):
        """
        Args:
            base: the folder, as the beginning of the files' paths. If it is an output itself, only
                the names of its kind are left out.
        """
        self.base = base
        self.outputs: dict[Path, str] = {}
        """The folders and files that are outputs, and their kinds."""
        self._base_kind = _kind_of(base)
        self._output_of: dict[Path, tuple[Path, str] | None] = {}

    def without(self, files: Iterable[Path]) -> list[Path]:
        """The files that may be data."""
        data_files = []
        for file in files:
            output = self._output_in_base(file) or self._enclosing_output(file.parent)
            if output is None:
                data_files.append(file)
            else:
                path, kind = output
                self.outputs[path] = kind
        return data_files

    def _enclosing_output(self, folder: Path) -> tuple[Path, str] | None:
        """The topmost output among a folder and its parents, and its kind."""
        if folder in (self.base, folder.parent):
            return None
        if folder not in self._output_of:
            output = self._enclosing_output(folder.parent) or self._output_in_base(folder)
            if output is None and (kind := _kind_of(folder)):
                output = folder, kind.words
            self._output_of[folder] = output
        return self._output_of[folder]

    def _output_in_base(self, path: Path) -> tuple[Path, str] | None:
        kind = self._base_kind
        if kind is None or path.parent != self.base or not kind.names.fullmatch(path.name):
            return None
        return path, kind.words


def _kind_of(folder: Path) -> _Kind | None:
    """The kind of an output; None for any other folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for kind in _KINDS:
        matches = [name for name in names if kind.names.fullmatch(name)]
        if len(matches) > 1 and any(kind.distinctive.fullmatch(name) for name in matches):
            return kind
    return None
