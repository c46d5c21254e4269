"""`tensors.json`: dtype and size of each tensor, where its parts are, and their checksums.

DCP's `.metadata` says the same, but as a pickle, and reading a pickle runs what it names. Both are
written, `.metadata` for other programs, and only this one is read.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.checkpoint.manifest import FileName, Manifest, Sum, first_problem, read_manifest
from torchtitan.data.text.contents import CONTENTS, Lists, parse_lists
from torchtitan.utils.errors import DamageError
from torchtitan.utils.files import read_regular
from torchtitan.utils.formats import Count, Strict
from torchtitan.utils.limits import JSON_BYTES
from torchtitan.utils.storage import patiently

INDEX = "tensors.json"
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


@dataclass
class Place(_StorageInfo):
    """Where a part is, with its checksum."""

    crc32: int | None = None


class TensorEntry(Strict):
    """One tensor. Its parts don't overlap."""

    dtype: str
    size: Size
    parts: list[Part]


_INDEX = TypeAdapter(dict[str, TensorEntry])


def render_index(metadata: Metadata, sums: Mapping[MetadataIndex, int]) -> bytes:
    """The file about a checkpoint that DCP has just written.

    Args:
        sums: CRC-32 of each part.
    """
    tensors = {}
    for name, about in metadata.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata), f"{name} is not a tensor"
        parts = []
        for chunk in about.chunks:
            index = MetadataIndex(name, chunk.offsets)
            place = metadata.storage_data[index]
            part = Part(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=place.relative_path,
                start=place.offset,
                length=place.length,
                crc32=sums[index],
            )
            parts.append(part)
        dtype = str(about.properties.dtype).removeprefix("torch.")
        tensors[name] = {
            "dtype": dtype,
            "size": list(about.size),
            "parts": parts,
        }
    return json.dumps(tensors, separators=(",", ":")).encode()


def index_bytes(path: Path, manifest: Manifest) -> bytes:
    """The index of the checkpoint `path`, as it is on disk.

    Raises:
        DamageError: it can't be read, or isn't as the manifest says.
    """
    return _listed_bytes(path, manifest, INDEX)


def data_files(path: Path, manifest: Manifest) -> Lists:
    """The data sources' files, as the checkpoint `path` lists them; none in earlier versions.

    Raises:
        DamageError: the list can't be read, or isn't as the manifest says.
    """
    if CONTENTS not in manifest.files:
        return {}
    if manifest.files[CONTENTS].bytes > JSON_BYTES:
        raise DamageError(f"{path} is damaged: {CONTENTS} is larger than {JSON_BYTES >> 20} MiB")
    content = _listed_bytes(path, manifest, CONTENTS)
    try:
        return parse_lists(content)
    except ValidationError as error:
        raise DamageError(f"{path} is damaged: {CONTENTS}: {first_problem(error)}") from None


def _listed_bytes(
    path: Path,
    manifest: Manifest,
    name: str,
) -> bytes:
    """A file of the checkpoint `path`, held in memory.

    Raises:
        DamageError: it can't be read, or isn't as the manifest says.
    """
    if name not in manifest.files:
        raise DamageError(f"{path} is damaged: its manifest doesn't list {name}")
    listed = manifest.files[name]
    try:
        content = patiently(path, lambda: read_regular(path / name, listed.bytes))
    except OSError as error:
        raise DamageError(f"{path} is damaged: {name}: {error.strerror or error}") from None
    if len(content) != listed.bytes or zlib.crc32(content) != listed.crc32:
        raise DamageError(f"{path} is damaged: {name}: its size or checksum is wrong")
    return content


def read_index(
    path: Path,
    manifest: Manifest | None = None,
    content: bytes | None = None,
) -> Metadata:
    """The tensors of the checkpoint `path`, after checking that its files can hold them.

    Args:
        manifest: of the checkpoint, if it was read already.
        content: `index_bytes`, if they were read already.

    Raises:
        DamageError: the index is damaged, or a part isn't inside of a file that the manifest lists.
    """
    if manifest is None:
        manifest = read_manifest(path)
    if content is None:
        content = index_bytes(path, manifest)
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    try:
        return parse_index(content, sizes)
    except ValidationError as error:
        raise DamageError(f"{path} is damaged: {INDEX}: {first_problem(error)}") from None
    except ValueError as error:
        raise DamageError(f"{path} is damaged: {INDEX}: {error}") from None


def parse_index(content: bytes, files: Mapping[str, int]) -> Metadata:
    """What DCP needs to read the tensors.

    Args:
        files: sizes in bytes, by name.

    Raises:
        ValueError: a tensor has no known dtype, or its parts don't fill it, or are not in `files`.
    """
    tensors = {}
    places = {}
    for name, entry in _INDEX.validate_json(content).items():
        try:
            dtype = _check(entry, files)
        except ValueError as error:
            raise ValueError(f"{name[:200]!a}: {error}") from None
        chunks = []
        for number, part in enumerate(entry.parts):
            offsets = torch.Size(part.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
            place = Place(part.file, part.start, part.length, crc32=part.crc32)
            places[MetadataIndex(name, offsets, number)] = place
        size = torch.Size(entry.size)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    return Metadata(tensors, storage_data=places)


def _check(entry: TensorEntry, files: Mapping[str, int]) -> torch.dtype:
    """The dtype of a tensor whose parts are complete and in `files`."""
    if entry.dtype not in _DTYPES:
        raise ValueError(f"no dtype is called {entry.dtype[:80]!a}")
    dtype = _DTYPES[entry.dtype]
    if prod(entry.size) * dtype.itemsize >= 2**63:
        raise ValueError("its size is beyond any memory")
    filled = 0
    for part in entry.parts:
        if not len(part.offsets) == len(part.sizes) == len(entry.size):
            raise ValueError("a part has other dimensions")
        if any(a + b > c for a, b, c in zip(part.offsets, part.sizes, entry.size, strict=True)):
            raise ValueError("a part is outside of it")
        if part.file not in files:
            raise ValueError(f"the manifest doesn't list its file {part.file}")
        elements = prod(part.sizes)
        end = part.start + part.length
        if end > files[part.file] or elements * dtype.itemsize > part.length:
            raise ValueError(f"{part.file} is too short for it")
        filled += elements
    if filled != prod(entry.size):
        raise ValueError(f"its parts hold {filled} elements instead of {prod(entry.size)}")
    return dtype
