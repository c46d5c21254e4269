"""`tensors.json`: dtype and size of each tensor, and which ranks have written which boxes of it.

It is as large on 8 ranks as on 16,384. Places and checksums of the parts are in the ranks' own
files (`parts.py`), of which a reader opens those that hold what it needs. DCP's `.metadata` says
all that too, but as a pickle, and reading a pickle runs what it names: it is written for other
programs, and never read.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan.checkpoint.layout import Layout
from torchtitan.checkpoint.manifest import Manifest, first_problem, read_manifest
from torchtitan.checkpoint.parts import (
    Part,
    RankFile,
    TensorShape,
    WrittenTensor,
    check_parts,
    name_of,
    read_rank,
)
from torchtitan.data.text.contents import CONTENTS, Lists, parse_lists
from torchtitan.utils.errors import DamageError
from torchtitan.utils.files import read_regular
from torchtitan.utils.limits import JSON_BYTES
from torchtitan.utils.storage import patiently

INDEX = "tensors.json"


@dataclass
class Place(_StorageInfo):
    """Where a part is, with its checksum."""

    crc32: int | None = None


class TensorEntry(TensorShape):
    """One tensor, in format 3. Its parts don't overlap."""

    parts: list[Part]


class TensorPlaces(TensorShape):
    """One tensor."""

    layout: Layout | None
    """The ranks that have written it; None: any."""


_PARTS = TypeAdapter(dict[str, TensorEntry])
_INDEX = TypeAdapter(dict[str, TensorPlaces])


def render_index(tensors: Mapping[str, TensorPlaces]) -> bytes:
    content = {name: about.model_dump() for name, about in tensors.items()}
    return json.dumps(content, separators=(",", ":")).encode()


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


def _listed_bytes(path: Path, manifest: Manifest, name: str) -> bytes:
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


class Index:
    """The tensors of a checkpoint. Where their parts are is read when it is needed."""

    def __init__(self, path: Path, manifest: Manifest | None = None, content: bytes | None = None):
        """
        Args:
            manifest: of the checkpoint, if it was read already.
            content: `index_bytes`, if they were read already.

        Raises:
            DamageError: the index is damaged.
        """
        self.path = path
        self.manifest = read_manifest(path) if manifest is None else manifest
        self._layouts: dict[str, Layout | None] = {}
        self._files: dict[int, RankFile] = {}
        self._located: dict[str, set[int]] = {}
        """The ranks whose parts of a tensor are known."""
        if content is None:
            content = index_bytes(path, self.manifest)
        with self._explained(INDEX):
            self.metadata = self._parse(content)

    def _parse(self, content: bytes) -> Metadata:
        if self.manifest.save is None:
            sizes = {name: file.bytes for name, file in self.manifest.files.items()}
            return parse_index(content, sizes)
        tensors = {}
        for name, about in _INDEX.validate_json(content).items():
            dtype = check_parts(name, about, [], {})
            layout = about.layout
            if layout is not None:
                pieces = prod(cut.pieces for cuts in layout.cuts for cut in cuts)
                ranks = self.manifest.written.ranks if self.manifest.written else 0
                if len(layout.cuts) != len(about.size) or pieces > ranks:
                    raise ValueError(f"{name[:200]!a}: its layout is not that of {ranks} ranks")
            self._layouts[name] = layout
            tensors[name] = _described(dtype, about)
        return Metadata(tensors, storage_data={})

    @contextmanager
    def _explained(self, file: str) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            raise DamageError(f"{self.path} is damaged: {file}: {first_problem(error)}") from None
        except ValueError as error:
            raise DamageError(f"{self.path} is damaged: {file}: {error}") from None

    def locate(self, key: str, box: ChunkStorageMetadata | None = None) -> None:
        """Let `metadata` know the parts that hold a box of a tensor, or the whole.

        Raises:
            DamageError: a rank's file is damaged, or the parts don't fill the box.
        """
        about = self.metadata.state_dict_metadata.get(key)
        if self.manifest.written is None or about is None:
            return
        size = tuple(about.size)
        if box is None:
            box = ChunkStorageMetadata(torch.Size([0] * len(size)), about.size)
        layout = self._layouts[key]
        every = range(self.manifest.written.ranks)
        ranks = set(every if layout is None else layout.ranks(size, box))
        known = self._located.setdefault(key, set())
        for rank in sorted(ranks - known):
            self._add(key, rank, every)
        known |= ranks
        filled = sum(_common(chunk, box) for chunk in about.chunks)
        if filled != prod(box.sizes):
            raise DamageError(
                f"{self.path} is damaged: {key[:200]!a}: its parts hold {filled} elements instead "
                f"of {prod(box.sizes)}"
            )

    def locate_all(self) -> None:
        """Locate every tensor, as `torchtitan ckpt verify` does.

        Raises:
            DamageError: see `locate`.
        """
        for key in self.metadata.state_dict_metadata:
            self.locate(key)

    def _add(self, key: str, rank: int, every: range) -> None:
        """Add the parts of a tensor that a rank wrote."""
        if rank not in self._files:
            if rank not in every:
                raise DamageError(f"{self.path} is damaged: {INDEX}: {key[:200]!a}: no rank {rank}")
            assert self.manifest.save is not None
            self._files[rank] = read_rank(self.path, self.manifest.save, rank)[0]
        found = self._files[rank].tensors.get(key)
        if found is None:
            return
        about = self.metadata.state_dict_metadata[key]
        if (found.size, found.dtype) != (tuple(about.size), dtype_name(about.properties.dtype)):
            raise DamageError(
                f"{self.path} is damaged: {name_of(rank)}: {key[:200]!a} is not as in {INDEX}"
            )
        for part in found.parts:
            self.metadata.storage_data[_add_part(about, key, part)] = _place(part)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(dtype: torch.dtype, about: TensorShape) -> TensorStorageMetadata:
    """What DCP knows of a tensor of which no part is known."""
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(about.size), [])


def _add_part(about: TensorStorageMetadata, key: str, part: Part) -> MetadataIndex:
    """Add a part to what DCP knows of a tensor; by what it finds the place."""
    offsets = torch.Size(part.offsets)
    about.chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
    return MetadataIndex(key, offsets, len(about.chunks) - 1)


def _place(part: Part) -> Place:
    return Place(part.file, part.start, part.length, crc32=part.crc32)


def add_written(metadata: Metadata, key: str, found: WrittenTensor) -> list[WriteResult]:
    """Add what a rank has written of a tensor to what DCP knows of a checkpoint; its places."""
    dtype = check_parts(key, found, [], {})
    about = metadata.state_dict_metadata.setdefault(key, _described(dtype, found))
    metadata.planner_data[key] = tuple(key.split(".", 1))
    results = []
    for part in found.parts:
        place = _StorageInfo(part.file, part.start, part.length)
        results.append(WriteResult(_add_part(about, key, part), part.length, place))
    return results


def _common(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> int:
    """Number of elements that are in both boxes."""
    ends = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return prod(max(0, min(i + m, j + n) - max(i, j)) for i, m, j, n in ends)


def read_index(path: Path, manifest: Manifest | None = None) -> Metadata:
    """All tensors of the checkpoint `path` and their parts, after checking that they fill them.

    Raises:
        DamageError: an index is damaged, or a part isn't inside of a file that is listed.
    """
    index = Index(path, manifest)
    index.locate_all()
    return index.metadata


def parse_index(content: bytes, files: Mapping[str, int]) -> Metadata:
    """What DCP needs to read the tensors, from an index of format 3.

    Args:
        files: sizes in bytes, by name.

    Raises:
        ValueError: a tensor has no known dtype, or its parts don't fill it, or are not in `files`.
    """
    metadata = Metadata({}, storage_data={})
    for name, entry in _PARTS.validate_json(content).items():
        dtype = check_parts(name, entry, entry.parts, files)
        filled = sum(prod(part.sizes) for part in entry.parts)
        if filled != prod(entry.size):
            raise ValueError(
                f"{name[:200]!a}: its parts hold {filled} elements instead of {prod(entry.size)}"
            )
        about = metadata.state_dict_metadata[name] = _described(dtype, entry)
        for part in entry.parts:
            metadata.storage_data[_add_part(about, name, part)] = _place(part)
    return metadata
