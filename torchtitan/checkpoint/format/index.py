"""The index of a checkpoint: its tensors, and the locations of their chunks.

`__N.json` lists the files of rank N, the chunks of tensors in them, and checksums. Each rank writes
one, so no rank collects the lists of all ranks. The last line is the SHA-256 of everything before
it, and the file repeats the manifest's number of the save, so a damaged file or a file of another
save is detected.

`tensors.json` has dtype, size and layout of each tensor: it is as large on 8 ranks as on 16,384. A
reader opens only the files of the ranks that wrote the boxes it needs. DCP's `.metadata` has the
same content, but is a pickle, and reading a pickle runs code: it is written for other programs, and
never read.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan.checkpoint.format.layout import Layout, fill
from torchtitan.checkpoint.format.manifest import (
    Crc32,
    FileEntry,
    FileName,
    Manifest,
    SaveNumber,
    first_problem,
    read_manifest,
    seal,
    unseal,
)
from torchtitan.data.read.contents import CONTENTS, FileLists, parse_lists
from torchtitan.data.read.positions import DataPosition
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


class StoredChunk(NamedTuple):
    """A chunk of a tensor: a box of its elements, and the bytes of a file that hold them."""

    offsets: Size
    sizes: Size
    file: FileName
    start: Count
    length: Count
    crc32: Crc32
    """CRC-32 of those bytes."""


class TensorShape(Strict):
    """Dtype and shape of a tensor."""

    dtype: str
    size: Size


class WrittenTensor(TensorShape):
    """A tensor with the chunks of it that one rank wrote."""

    layout: Layout | None
    """None if the rank's box differs from the layout's."""
    parts: list[StoredChunk]
    """The chunks; the name is part of the format."""


class RankFile(Strict):
    """The content of `__N.json`."""

    save: SaveNumber
    rank: Count
    data: DataPosition | None = None
    """The rank's data lanes and their positions; rank 0 reads them to write the manifest."""
    files: dict[FileName, FileEntry]
    tensors: dict[str, WrittenTensor]


def rank_file_name(rank: int) -> str:
    return f"__{rank}.json"


def render_rank(content: RankFile) -> bytes:
    return seal(content.model_dump_json().encode())


def read_rank(path: Path, save: str, rank: int) -> tuple[RankFile, FileEntry]:
    """Read `__N.json` of `rank` in the checkpoint `path`; returns its content, size and checksum.

    Args:
        save: the manifest's `save`.

    Raises:
        DamageError: it can't be read, belongs to another save, or was changed.
    """
    name = rank_file_name(rank)
    try:
        content = patiently(path, lambda: read_regular(path / name, JSON_BYTES))
        record = RankFile.model_validate_json(unseal(content))
        if (record.save, record.rank) != (save, rank):
            raise ValueError("it belongs to another save, or another rank")
        sizes = {file: entry.bytes for file, entry in record.files.items()}
        for key, tensor in record.tensors.items():
            check_chunks(key, tensor, tensor.parts, sizes)
    except OSError as error:
        raise DamageError(f"{path} is damaged: {name}: {error.strerror or error}") from error
    except ValidationError as error:
        raise DamageError(f"{path} is damaged: {name}: {first_problem(error)}") from None
    except ValueError as error:
        raise DamageError(f"{path} is damaged: {name}: {error}") from None
    return record, FileEntry(bytes=len(content), crc32=zlib.crc32(content))


def file_entries(
    path: Path, manifest: Manifest, share: int = 0, shares: int = 1
) -> Iterator[tuple[str, FileEntry]]:
    """The files of a checkpoint, except the manifest.

    Args:
        share: yield only every `shares`-th file, beginning with this one.

    Raises:
        DamageError: a rank's `__N.json` can't be read.
    """
    yield from list(manifest.files.items())[share::shares]
    for rank in range(share, manifest.written.ranks, shares):
        content, entry = read_rank(path, manifest.save, rank)
        yield rank_file_name(rank), entry
        yield from content.files.items()


def check_chunks(
    key: str, shape: TensorShape, chunks: list[StoredChunk], files: Mapping[str, int]
) -> torch.dtype:
    """Check that the chunks of a tensor are inside it and in `files`; returns its dtype.

    Args:
        files: sizes in bytes, by name.

    Raises:
        ValueError: a chunk isn't, or such a tensor can't exist.
    """
    try:
        return _check(shape, chunks, files)
    except ValueError as error:
        raise ValueError(f"{key[:200]!a}: {error}") from None


def _check(shape: TensorShape, chunks: list[StoredChunk], files: Mapping[str, int]) -> torch.dtype:
    if shape.dtype not in _DTYPES:
        raise ValueError(f"no dtype is called {shape.dtype[:80]!a}")
    dtype = _DTYPES[shape.dtype]
    if prod(shape.size) * dtype.itemsize >= 2**63:
        raise ValueError("its size is beyond any memory")
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape.size):
            raise ValueError("a part has other dimensions")
        if any(a + b > c for a, b, c in zip(chunk.offsets, chunk.sizes, shape.size, strict=True)):
            raise ValueError("a part is outside of it")
        if chunk.file not in files:
            raise ValueError(f"the manifest doesn't list its file {chunk.file}")
        end = chunk.start + chunk.length
        if end > files[chunk.file] or prod(chunk.sizes) * dtype.itemsize > chunk.length:
            raise ValueError(f"{chunk.file} is too short for it")
    return dtype


@dataclass
class ChunkLocation(_StorageInfo):
    """The location of a chunk in a file, with its checksum."""

    crc32: int = field(kw_only=True)


class IndexedTensor(TensorShape):
    """A tensor in `tensors.json`."""

    layout: Layout | None
    """The ranks that wrote its boxes; None: any rank may have."""


_INDEX = TypeAdapter(dict[str, IndexedTensor])


def render_index(tensors: Mapping[str, IndexedTensor]) -> bytes:
    content = {name: tensor.model_dump() for name, tensor in tensors.items()}
    return json.dumps(content, separators=(",", ":")).encode()


def index_bytes(path: Path, manifest: Manifest) -> bytes:
    """The index of the checkpoint `path`, as it is on disk.

    Raises:
        DamageError: it can't be read, or doesn't match the manifest.
    """
    return _read_verified(path, manifest, INDEX)


def data_files(path: Path, manifest: Manifest) -> FileLists:
    """The data sources' files at the time of the checkpoint `path`.

    Raises:
        DamageError: the list can't be read, or doesn't match the manifest.
    """
    if CONTENTS in manifest.files and manifest.files[CONTENTS].bytes > JSON_BYTES:
        raise DamageError(f"{path} is damaged: {CONTENTS} is larger than {JSON_BYTES >> 20} MiB")
    content = _read_verified(path, manifest, CONTENTS)
    try:
        return parse_lists(content)
    except ValidationError as error:
        raise DamageError(f"{path} is damaged: {CONTENTS}: {first_problem(error)}") from None


def _read_verified(path: Path, manifest: Manifest, name: str) -> bytes:
    """The content of a file that the manifest lists.

    Raises:
        DamageError: it can't be read, or doesn't match the manifest.
    """
    if name not in manifest.files:
        raise DamageError(f"{path} is damaged: its manifest doesn't list {name}")
    entry = manifest.files[name]
    try:
        content = patiently(path, lambda: read_regular(path / name, entry.bytes))
    except OSError as error:
        raise DamageError(f"{path} is damaged: {name}: {error.strerror or error}") from None
    if len(content) != entry.bytes or zlib.crc32(content) != entry.crc32:
        raise DamageError(f"{path} is damaged: {name}: its size or checksum is wrong")
    return content


class Index:
    """The tensors of a checkpoint. The locations of their chunks are read on demand."""

    def __init__(self, path: Path, manifest: Manifest | None = None, content: bytes | None = None):
        """
        Args:
            manifest: the checkpoint's, if it was read already.
            content: `index_bytes`, if they were read already.

        Raises:
            DamageError: the index is damaged.
        """
        self.path = path
        self.manifest = read_manifest(path) if manifest is None else manifest
        self._layouts: dict[str, Layout | None] = {}
        self._files: dict[int, RankFile] = {}
        self._ranks_by_tensor: dict[str, set[int]] = {}
        """For each tensor, the ranks whose chunks are in `metadata`."""
        if content is None:
            content = index_bytes(path, self.manifest)
        with self._as_damage(INDEX):
            self.metadata = self._parse(content)

    def _parse(self, content: bytes) -> Metadata:
        tensors = {}
        for name, tensor in _INDEX.validate_json(content).items():
            dtype = check_chunks(name, tensor, [], {})
            layout = tensor.layout
            if layout is not None:
                pieces = prod(cut.pieces for cuts in layout.cuts for cut in cuts)
                ranks = self.manifest.written.ranks
                if len(layout.cuts) != len(tensor.size) or pieces > ranks:
                    raise ValueError(f"{name[:200]!a}: its layout is not for {ranks} ranks")
            self._layouts[name] = layout
            tensors[name] = _without_chunks(dtype, tensor)
        return Metadata(tensors, storage_data={})

    @contextmanager
    def _as_damage(self, file: str) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise DamageError(f"{self.path} is damaged: {file}: {first_problem(error)}") from None
        except ValueError as error:
            raise DamageError(f"{self.path} is damaged: {file}: {error}") from None

    def locate(self, key: str, box: ChunkStorageMetadata | None = None) -> None:
        """Add to `metadata` the chunks that hold a box of a tensor, or all of it.

        Raises:
            DamageError: a rank's file is damaged, or the chunks don't fill the box.
        """
        tensor = self.metadata.state_dict_metadata.get(key)
        if tensor is None:
            return
        size = tuple(tensor.size)
        if box is None:
            box = ChunkStorageMetadata(torch.Size([0] * len(size)), tensor.size)
        layout = self._layouts[key]
        all_ranks = range(self.manifest.written.ranks)
        ranks = self._ranks_by_tensor.setdefault(key, set())
        for rank in all_ranks if layout is None else sorted(set(layout.ranks(size, box))):
            if rank not in ranks:
                self._add(key, rank, all_ranks)
                ranks.add(rank)
        count = sum(_common(chunk, box) for chunk in tensor.chunks)
        if count != prod(box.sizes):
            raise DamageError(
                f"{self.path} is damaged: {key[:200]!a}: its parts hold {count} elements instead "
                f"of {prod(box.sizes)}"
            )
        if not fill(tensor.chunks, box):
            raise DamageError(f"{self.path} is damaged: {key[:200]!a}: its parts overlap")

    def locate_all(self) -> None:
        """Locate the chunks of every tensor, as `torchtitan ckpt verify` does.

        Raises:
            DamageError: see `locate`.
        """
        for key in self.metadata.state_dict_metadata:
            self.locate(key)

    def _add(self, key: str, rank: int, ranks: range) -> None:
        """Add the chunks of a tensor that a rank wrote."""
        if rank not in self._files:
            if rank not in ranks:
                raise DamageError(f"{self.path} is damaged: {INDEX}: {key[:200]!a}: no rank {rank}")
            self._files[rank] = read_rank(self.path, self.manifest.save, rank)[0]
        tensor = self._files[rank].tensors.get(key)
        if tensor is None:
            return
        entry = self.metadata.state_dict_metadata[key]
        if (tensor.size, tensor.dtype) != (tuple(entry.size), dtype_name(entry.properties.dtype)):
            file = rank_file_name(rank)
            raise DamageError(f"{self.path} is damaged: {file}: {key[:200]!a} is not as in {INDEX}")
        for chunk in tensor.parts:
            self.metadata.storage_data[_add_chunk(entry, key, chunk)] = _location(chunk)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _without_chunks(dtype: torch.dtype, shape: TensorShape) -> TensorStorageMetadata:
    """DCP's metadata of a tensor, without chunks."""
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape.size), [])


def _add_chunk(tensor: TensorStorageMetadata, key: str, chunk: StoredChunk) -> MetadataIndex:
    """Add a chunk to DCP's metadata of a tensor; returns the key of its location."""
    offsets = torch.Size(chunk.offsets)
    tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
    return MetadataIndex(key, offsets, len(tensor.chunks) - 1)


def _location(chunk: StoredChunk) -> ChunkLocation:
    return ChunkLocation(chunk.file, chunk.start, chunk.length, crc32=chunk.crc32)


def add_chunks(metadata: Metadata, key: str, tensor: WrittenTensor) -> list[WriteResult]:
    """Add a rank's chunks of a tensor to DCP's metadata; returns their locations."""
    dtype = check_chunks(key, tensor, [], {})
    entry = metadata.state_dict_metadata.setdefault(key, _without_chunks(dtype, tensor))
    metadata.planner_data[key] = tuple(key.split(".", 1))
    results = []
    for chunk in tensor.parts:
        location = _StorageInfo(chunk.file, chunk.start, chunk.length)
        results.append(WriteResult(_add_chunk(entry, key, chunk), chunk.length, location))
    return results


def _common(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> int:
    """Number of elements that are in both boxes."""
    ends = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return prod(max(0, min(i + m, j + n) - max(i, j)) for i, m, j, n in ends)


def read_index(path: Path, manifest: Manifest | None = None) -> Metadata:
    """All tensors of the checkpoint `path` and their chunks, which are checked to fill them.

    Raises:
        DamageError: an index is damaged, or a chunk is in no file of the manifest.
    """
    index = Index(path, manifest)
    index.locate_all()
    return index.metadata
