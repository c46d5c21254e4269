"""Folders that training and its tools write: runs, checkpoints, models. They hold no documents.

A folder of data may lie beside them, or above: `dataset_path = "."` beside `outputs/`. Their JSON
files would be read as documents, and grow while the run reads them. They are recognized by the
names in them: by at least two that such a folder has, one of which is typical.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class _Kind(NamedTuple):
    words: str
    typical: re.Pattern[str]
    names: re.Pattern[str]
    """All names of files and folders that can hold what looks like documents."""


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


class WrittenFolders:
    """Leaves the files of such folders out of those below a folder that the user named."""

    def __init__(self, base: Path):
        """
        Args:
            base: the folder, as the beginning of the files' paths. Of this one, only the files and
                folders of a run, checkpoint or model are left out.
        """
        self.base = base
        self.left_out: dict[Path, str] = {}
        """The folders and files left out, and which kind they are of."""
        self._base_kind = _kind_of(base)
        self._known: dict[Path, tuple[Path, str] | None] = {}

    def without(self, files: Iterable[Path]) -> list[Path]:
        """The files that may be data."""
        kept = []
        for file in files:
            written = self._part_of_base(file) or self._around(file.parent)
            if written is None:
                kept.append(file)
            else:
                path, kind = written
                self.left_out[path] = kind
        return kept

    def _around(self, folder: Path) -> tuple[Path, str] | None:
        """The topmost written folder among this one and those above it, and its kind."""
        if folder in (self.base, folder.parent):
            return None
        if folder not in self._known:
            written = self._around(folder.parent) or self._part_of_base(folder)
            if written is None and (kind := _kind_of(folder)):
                written = folder, kind.words
            self._known[folder] = written
        return self._known[folder]

    def _part_of_base(self, path: Path) -> tuple[Path, str] | None:
        kind = self._base_kind
        if kind is None or path.parent != self.base or not kind.names.fullmatch(path.name):
            return None
        return path, kind.words


def _kind_of(folder: Path) -> _Kind | None:
    """The kind of such a folder; None of any other."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for kind in _KINDS:
        fitting = [name for name in names if kind.names.fullmatch(name)]
        if len(fitting) > 1 and any(kind.typical.fullmatch(name) for name in fitting):
            return kind
    return None
