"""`__N.json`: what rank N wrote into a checkpoint: its files, the parts of tensors in them, and
their checksums.

Each rank writes its own, so no rank collects what all have written. The file's last line is the
SHA-256 of all before it, and it repeats the number of the save that the manifest has: a file that
is damaged, or of another save, is told from its content.
"""

import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, ValidationError

from torchtitan.checkpoint.layout import Layout
from torchtitan.checkpoint.manifest import (
    FileEntry,
    FileName,
    Manifest,
    SaveNumber,
    Sum,
    first_problem,
    sealed,
    unsealed,
)
from torchtitan.data.positions import DataPosition
from torchtitan.utils.errors import DamageError
from torchtitan.utils.files import read_regular
from torchtitan.utils.formats import Count, Strict
from torchtitan.utils.limits import JSON_BYTES
from torchtitan.utils.storage import patiently

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

Size = Annotated[tuple[Count, ...], Field(max_length=64)]


class Part(NamedTuple):
    """A box of a tensor, and the bytes that hold it."""

    offsets: Size
    sizes: Size
    file: FileName
    start: Count
    length: Count
    crc32: Sum | None = None
    """Their CRC-32. None if an earlier version wrote the checkpoint."""


class TensorShape(Strict):
    """One tensor."""

    dtype: str
    size: Size


class WrittenTensor(TensorShape):
    """One tensor, as a rank wrote it."""

    layout: Layout | None
    """None if the rank's box isn't where the layout has it."""
    parts: list[Part]


class RankFile(Strict):
    """The content of `__N.json`."""

    save: SaveNumber
    rank: Count
    data: DataPosition | None = None
    """Where its lanes of the data are; only rank 0 reads it, to write the manifest."""
    files: dict[FileName, FileEntry]
    tensors: dict[str, WrittenTensor]


def name_of(rank: int) -> str:
    return f"__{rank}.json"


def render_rank(content: RankFile) -> bytes:
    return sealed(content.model_dump_json().encode())


def read_rank(path: Path, save: str, rank: int) -> tuple[RankFile, FileEntry]:
    """What `rank` wrote into the checkpoint `path`, and the size and checksum of the file about it.

    Args:
        save: the manifest's `save`.

    Raises:
        DamageError: it can't be read, or isn't of this save, or is not as it was written.
    """
    name = name_of(rank)
    try:
        content = patiently(path, lambda: read_regular(path / name, JSON_BYTES))
        found = RankFile.model_validate_json(unsealed(content))
        if (found.save, found.rank) != (save, rank):
            raise ValueError("it belongs to another save, or another rank")
        sizes = {file: entry.bytes for file, entry in found.files.items()}
        for key, tensor in found.tensors.items():
            check_parts(key, tensor, tensor.parts, sizes)
    except OSError as error:
        raise DamageError(f"{path} is damaged: {name}: {error.strerror or error}") from error
    except ValidationError as error:
        raise DamageError(f"{path} is damaged: {name}: {first_problem(error)}") from None
    except ValueError as error:
        raise DamageError(f"{path} is damaged: {name}: {error}") from None
    return found, FileEntry(bytes=len(content), crc32=zlib.crc32(content))


def files_of(
    path: Path, manifest: Manifest, part: int = 0, parts: int = 1
) -> Iterator[tuple[str, FileEntry]]:
    """The files of a checkpoint, but the manifest.

    Args:
        part: only a share of them, number `part` of `parts`.

    Raises:
        DamageError: a rank's own list can't be read.
    """
    yield from list(manifest.files.items())[part::parts]
    if manifest.written is None:
        return
    for rank in range(part, manifest.written.ranks, parts):
        assert manifest.save is not None
        content, about = read_rank(path, manifest.save, rank)
        yield name_of(rank), about
        yield from content.files.items()


def check_parts(
    key: str, shape: TensorShape, parts: list[Part], files: Mapping[str, int]
) -> torch.dtype:
    """The dtype of a tensor whose parts are inside it, and in `files`.

    Args:
        files: sizes in bytes, by name.

    Raises:
        ValueError: one isn't.
    """
    try:
        return _check(shape, parts, files)
    except ValueError as error:
        raise ValueError(f"{key[:200]!a}: {error}") from None


def _check(shape: TensorShape, parts: list[Part], files: Mapping[str, int]) -> torch.dtype:
    if shape.dtype not in _DTYPES:
        raise ValueError(f"no dtype is called {shape.dtype[:80]!a}")
    dtype = _DTYPES[shape.dtype]
    if prod(shape.size) * dtype.itemsize >= 2**63:
        raise ValueError("its size is beyond any memory")
    for part in parts:
        if not len(part.offsets) == len(part.sizes) == len(shape.size):
            raise ValueError("a part has other dimensions")
        if any(a + b > c for a, b, c in zip(part.offsets, part.sizes, shape.size, strict=True)):
            raise ValueError("a part is outside of it")
        if part.file not in files:
            raise ValueError(f"the manifest doesn't list its file {part.file}")
        end = part.start + part.length
        if end > files[part.file] or prod(part.sizes) * dtype.itemsize > part.length:
            raise ValueError(f"{part.file} is too short for it")
    return dtype
