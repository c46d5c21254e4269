"""Exact duplicates among documents, by 64-bit hashes of their texts.

The hashes of each token file lie sorted beside it, so that any number of them are compared one
range at a time. Among a billion documents, about 0.03 pairs share a hash by chance.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.utils.files import write_whole

HASH = np.dtype([("hash", "<u8"), ("bytes", "<u8")])
"""A document: its hash and the bytes of its text."""
_HELD = 4_000_000
"""Hashes compared at a time."""


def save_hashes(file: Path, hashes: NDArray[Any]) -> None:
    """Write hashes, sorted."""
    write_whole(file, np.sort(hashes, order="hash").tobytes())


def count_duplicates(files: Sequence[Path], held: int = _HELD) -> tuple[int, int]:
    """Number and bytes of the documents that have an equal one before them.

    Args:
        files: written by `save_hashes`.
        held: about how many hashes to hold in memory.
    """
    tables = [np.memmap(file, HASH, "r") for file in files if file.stat().st_size]
    ranges = -(-sum(map(len, tables)) // held)
    number = size = 0
    for i in range(ranges):
        first, last = ((2**64 * j // ranges) for j in (i, i + 1))
        parts = []
        for table in tables:
            begin = np.searchsorted(table["hash"], np.uint64(first))
            end = len(table) if last == 2**64 else np.searchsorted(table["hash"], np.uint64(last))
            parts.append(table[begin:end])
        found = np.concatenate(parts)
        found = found[np.argsort(found["hash"], kind="stable")]
        again = found["hash"][1:] == found["hash"][:-1]
        number += int(again.sum())
        size += int(found["bytes"][1:][again].sum())
    return number, size
