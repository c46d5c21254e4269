"""The runs below a folder."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan.tools.reports.folder import METRICS, RECORD

_INNER = re.compile(
    r"step-\d+|checkpoint|tb|logs|wandb|mlruns|comm_traces|profile_traces|memory_snapshot|\..*"
)
"""Folders in which there are no runs, but maybe many files."""


class Runs:
    """Finds the runs below some folders, in the order of their paths."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.unreadable: list[str] = []
        """What is wrong with the folders that could not be read."""
        self._seen: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[Path]:
        for folder in self.folders:
            yield from self._below(folder)

    def _below(self, top: Path) -> Iterator[Path]:
        """The runs in `top` and the folders below. Links are followed; no folder is visited
        twice.
        """
        waiting = [str(top)]
        while waiting:
            folder = waiting.pop()
            try:
                status = os.stat(folder)
                if (identity := (status.st_dev, status.st_ino)) in self._seen:
                    continue
                self._seen.add(identity)
                with os.scandir(folder) as entries:
                    found = {entry.name: _is_folder(entry) for entry in entries}
            except OSError as error:
                self.unreadable.append(f"{folder}: {error.strerror or error}")
                continue
            if found.get(RECORD) is False or found.get(METRICS) is False:
                yield Path(folder)
            inner = (
                name
                for name, is_folder in found.items()
                if is_folder and not _INNER.fullmatch(name)
            )
            waiting += (os.path.join(folder, name) for name in sorted(inner, reverse=True))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
