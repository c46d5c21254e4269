"""What a checkpoint's tensors are, and where their parts are.

`__N.json` is what rank N wrote: its files, the parts of tensors in them, and their checksums. Each
rank writes its own, so no rank collects what all have written. The file's last line is the SHA-256
of all before it, and it repeats the number of the save that the manifest has: so a damaged file, or
one of another save, is detected.

`tensors.json` has dtype and size of each tensor, and which ranks have written which boxes of it: it
is as large on 8 ranks as on 16,384. A reader opens the files of the ranks that hold what it needs.
DCP's `.metadata` says all that too, but as a pickle, and reading a pickle runs what it names: it is
written for other programs, and never read.
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

from torchtitan.checkpoint.format.layout import Layout
from torchtitan.checkpoint.format.manifest import (
    FileEntry,
    FileName,
    Manifest,
    SaveNumber,
    Sum,
    first_problem,
    read_manifest,
    sealed,
    unsealed,
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


class TensorPart(NamedTuple):
    """A box of a tensor, and the bytes that hold it."""

    offsets: Size
    sizes: Size
    file: FileName
    start: Count
    length: Count
    crc32: Sum
    """CRC-32 of those bytes."""


class TensorShape(Strict):
    """One tensor."""

    dtype: str
    size: Size


class WrittenTensor(TensorShape):
    """One tensor, as a rank wrote it."""

    layout: Layout | None
    """None if the rank's box isn't where the layout has it."""
    parts: list[TensorPart]


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
    for rank in range(part, manifest.written.ranks, parts):
        content, about = read_rank(path, manifest.save, rank)
        yield name_of(rank), about
        yield from content.files.items()


def check_parts(
    key: str, shape: TensorShape, parts: list[TensorPart], files: Mapping[str, int]
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


def _check(shape: TensorShape, parts: list[TensorPart], files: Mapping[str, int]) -> torch.dtype:
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


@dataclass
class Place(_StorageInfo):
    """Where a part is, with its checksum."""

    crc32: int = field(kw_only=True)


class TensorPlaces(TensorShape):
    """One tensor."""

    layout: Layout | None
    """The ranks that have written it; None: any."""


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


def data_files(path: Path, manifest: Manifest) -> FileLists:
    """The data sources' files, as the checkpoint `path` lists them.

    Raises:
        DamageError: the list can't be read, or isn't as the manifest says.
    """
    if CONTENTS in manifest.files and manifest.files[CONTENTS].bytes > JSON_BYTES:
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
        tensors = {}
        for name, about in _INDEX.validate_json(content).items():
            dtype = check_parts(name, about, [], {})
            layout = about.layout
            if layout is not None:
                pieces = prod(cut.pieces for cuts in layout.cuts for cut in cuts)
                ranks = self.manifest.written.ranks
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
        if about is None:
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


def _add_part(about: TensorStorageMetadata, key: str, part: TensorPart) -> MetadataIndex:
    """Add a part to what DCP knows of a tensor; by what it finds the place."""
    offsets = torch.Size(part.offsets)
    about.chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
    return MetadataIndex(key, offsets, len(about.chunks) - 1)


def _place(part: TensorPart) -> Place:
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
