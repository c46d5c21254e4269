"""Token files of Megatron: flat ids in `X.bin`, described by `X.idx`.

    X.idx   "MMIDIDX\\0\\0", version (uint64), code of the ids' type (uint8), number of sequences
            and of document boundaries (uint64 each); then the sequences' lengths (int32), their
            first bytes in X.bin (int64), and the boundaries: the first sequence of each document,
            and the number of sequences (int64)

The ids are read as one sequence, as in our token files, with the begin-of-text and end-of-text that
the file contains.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.data.read.opening import DataError, FilePool, FileStamp

_MAGIC = b"MMIDIDX\0\0"
_OLD_MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_NOT_IDS = {6: "float64", 7: "float32"}
_AT_ONCE = 2**20
"""Number of sequences checked at once."""


def read_index(tokens: FileStamp) -> tuple[str, int]:
    """The type and number of the ids in a `.bin` file, according to its `.idx` file.

    Raises:
        OSError: reading fails.
        DataError: the index isn't one, is damaged, or doesn't fit the file.
    """
    index = Path(tokens.path).with_suffix(".idx")
    size = FileStamp.of(index).size
    files = FilePool()
    header = files.read(str(index), 0, min(size, _HEADER.size))
    dtype, sequences, boundaries = _read_header(index, header)
    index_bytes = _HEADER.size + 12 * sequences + 8 * boundaries
    if size == index_bytes + sequences and sequences:
        raise DataError(
            f"{index} gives modes to its sequences (multimodal data), which can't be read"
        )
    if size != index_bytes:
        raise DataError(
            f"{index} has {size:,} bytes instead of the {index_bytes:,} of its {sequences:,} "
            f"sequences and {boundaries:,} document boundaries (cut off?)"
        )
    count = _check_sequences(files, index, sequences, dtype.itemsize)
    _check_documents(files, index, sequences, boundaries)
    ids_size = count * dtype.itemsize
    if tokens.size != ids_size:
        raise DataError(
            f"{tokens.path} has {tokens.size:,} bytes instead of the {ids_size:,} of "
            f"{index.name} (cut off?)"
        )
    return dtype.name, count


def _read_header(index: Path, header: bytes) -> tuple[np.dtype[Any], int, int]:
    if header.startswith(_OLD_MAGIC):
        raise DataError(
            f"{index} is an index of Megatron's older kind; preprocess the text with "
            "--dataset-impl mmap"
        )
    if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
        raise DataError(f"{index} is no index of a Megatron token file (cut off?)")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{index} has version {version}; only version 1 can be read")
    if code not in _TYPES:
        kind = _NOT_IDS.get(code, "unknown")
        raise DataError(f"{index}: its values are of type {code} ({kind}), which are no token ids")
    return np.dtype(_TYPES[code]), sequences, boundaries


def _check_sequences(files: FilePool, index: Path, sequences: int, itemsize: int) -> int:
    """The number of ids.

    Raises:
        DataError: the sequences don't lie one after another.
    """
    lengths_at = _HEADER.size
    pointers_at = lengths_at + 4 * sequences
    total = 0
    for first in range(0, sequences, _AT_ONCE):
        count = min(_AT_ONCE, sequences - first)
        content = files.read(str(index), lengths_at + 4 * first, 4 * count)
        lengths = np.frombuffer(content, "<i4").astype(np.int64)
        content = files.read(str(index), pointers_at + 8 * first, 8 * count)
        pointers = np.frombuffer(content, "<i8")
        starts = total + np.cumsum(lengths) - lengths
        wrong = np.flatnonzero((lengths < 0) | (pointers != starts * itemsize))
        if len(wrong):
            raise DataError(
                f"{index}: sequence {first + int(wrong[0])} doesn't begin where the one "
                "before it ends (damaged?)"
            )
        total += int(lengths.sum())
    return total


def _check_documents(files: FilePool, index: Path, sequences: int, boundaries: int) -> None:
    begin = _HEADER.size + 12 * sequences
    last = 0
    for first in range(0, boundaries, _AT_ONCE):
        count = min(_AT_ONCE, boundaries - first)
        bounds = np.frombuffer(files.read(str(index), begin + 8 * first, 8 * count), "<i8")
        if bounds[0] < last or (np.diff(bounds) < 0).any():
            raise DataError(f"{index}: the boundaries of its documents aren't in order (damaged?)")
        last = int(bounds[-1])
    if last != sequences:
        raise DataError(f"{index}: its documents end at sequence {last} of {sequences} (damaged?)")
