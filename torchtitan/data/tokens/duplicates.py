"""Exact duplicates among documents, by 64-bit hashes of their texts.

The hashes of each token file lie sorted beside it, so that any number of them are compared one
range at a time. Among a billion documents, about 0.03 pairs share a hash by chance. To drop
duplicates while they are read, `Seen` holds all hashes so far.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.utils.files import write_whole

HASH = np.dtype([("hash", "<u8"), ("bytes", "<u8")])
"""The hash of a document and the size of its text."""
_MAX_HASHES = 4_000_000
"""Number of hashes compared at a time."""


def save_hashes(file: Path, hashes: NDArray[Any]) -> None:
    """Write hashes, sorted."""
    write_whole(file, np.sort(hashes, order="hash").tobytes())


def count_duplicates(files: Sequence[Path], max_hashes: int = _MAX_HASHES) -> tuple[int, int]:
    """Number and bytes of the documents that equal an earlier one.

    Args:
        files: written by `save_hashes`.
        max_hashes: approximate number of hashes to keep in memory.
    """
    tables = [np.memmap(file, HASH, "r") for file in files if file.stat().st_size]
    ranges = -(-sum(map(len, tables)) // max_hashes)
    number = 0
    size = 0
    begins = [0] * len(tables)
    for i in range(1, ranges + 1):
        ranges_of_files = []
        for which, table in enumerate(tables):
            end = len(table)
            if i < ranges:
                end = int(np.searchsorted(table["hash"], np.uint64(2**64 * i // ranges)))
            ranges_of_files.append(table[begins[which] : end])
            begins[which] = end
        hashes = np.concatenate(ranges_of_files)
        hashes = hashes[np.argsort(hashes["hash"], kind="stable")]
        again = hashes["hash"][1:] == hashes["hash"][:-1]
        number += int(again.sum())
        size += int(hashes["bytes"][1:][again].sum())
    return number, size


class Seen:
    """The documents so far, by 64-bit keys: 8 bytes each, and as much again while runs are merged.

    Keys are in sorted runs, each more than twice as long as the next, as in a log-structured merge
    tree.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Add keys, in any order."""
        run = np.sort(keys)
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # merges what is sorted
        if len(run):
            self._runs.append(run)

    def has(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which keys were added."""
        known = np.zeros(len(keys), bool)
        for run in self._runs:
            positions = np.searchsorted(run, keys)
            known |= run[np.minimum(positions, len(run) - 1)] == keys
        return known

    def take(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add the keys of further documents; returns which documents are new.

        A document is new if none of its keys occurs in an earlier new one.

        Args:
            keys: `[documents, keys]`.
        """
        known = self.has(keys.reshape(-1)).reshape(keys.shape)
        new: NDArray[np.bool_] = np.all(~known, axis=1)
        here: set[int] = set()
        for i in np.flatnonzero(new):
            document_keys = keys[i].tolist()
            new[i] = here.isdisjoint(document_keys)
            if new[i]:
                here.update(document_keys)
        self.add(keys[new].reshape(-1))
        return new
