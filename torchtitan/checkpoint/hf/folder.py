"""Reading a Hugging Face model's folder, which may hold anything: `config.json` and safetensors.

Only regular files are opened, and nothing is unpickled. The library `safetensors` checks the
headers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from torchtitan.checkpoint.load import alone
from torchtitan.checkpoint.save import unwrapped
from torchtitan.models import HFNames
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.formats import read_json_object

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""The names that safetensors gives dtypes of weights."""
_NAMED = {name: dtype for dtype, name in DTYPES.items()}
_INDEX = "model.safetensors.index.json"
MAPPED_BYTES = 32 * 2**20
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
T = TypeVar("T")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a Hugging Face model's folder.

    Raises:
        CheckpointError: it is missing or invalid, or the folder has no weights.
    """
    try:
        config = read_json_object(folder / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not the folder of a Hugging Face model: config.json: {error}; "
            "download one, for example with scripts/download_hf_assets.py of the repository"
        ) from None
    _weight_files(folder)
    return config


class _Index(BaseModel):
    """Which file holds which weight, in a folder of several files."""

    model_config = {"strict": True}

    weight_map: dict[str, str]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors that the folder's index names, or all.

    Raises:
        CheckpointError: there are none, or the index is damaged or names files elsewhere.
    """
    index = folder / _INDEX
    if not index.exists():
        if found := sorted(folder.glob("*.safetensors")):
            return found
        if pickles := sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern)):
            raise CheckpointError(
                f"no .safetensors files in {folder}, but {pickles[0]}: a pickle, which runs code "
                "when it is read. If you trust it, convert it with transformers: "
                "from_pretrained(...).save_pretrained(...)"
            )
        raise CheckpointError(
            f"no .safetensors files in {folder}, the folder of a Hugging Face model "
            "(checkpoint.initial_load_path, or model.hf_assets_path without it)"
        )
    try:
        names = sorted(set(_Index.model_validate(read_json_object(index)).weight_map.values()))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise CheckpointError(f"{index}: {place}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name[:200]!r}, must name .safetensors files beside it"
            )
    return [folder / name for name in names]


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class _Piece(NamedTuple):
    """What to read of a tensor in a file, and where to."""

    part: str
    slices: tuple[slice, ...]
    """One for each dimension, or for each of the stack; none: all of it."""
    target: Tensor


def parts_of(theirs: str | list[str]) -> list[str]:
    """The names in a folder of what is one weight for us."""
    return [theirs] if isinstance(theirs, str) else theirs


class SafetensorsReader(HuggingFaceStorageReader):
    """Reads weights under our names. Only the slices that a rank needs are read, one at a time.

    To torch's checkpointing (DCP) a stack is a tensor that was saved in as many chunks as it has
    parts.
    """

    def __init__(self, folder: Path, names: HFNames):
        """
        Raises:
            CheckpointError: the folder has no safetensors, or one is damaged.
        """
        super().__init__(str(folder))
        self.folder = folder
        self.names = names
        self.entries: dict[str, _Entry] = {}
        """What the folder holds, by its names."""
        for file in _weight_files(folder):
            for name, entry in _read_header(file).items():
                if first := self.entries.get(name):
                    raise CheckpointError(f"{name} is in two files: {first.file} and {file}")
                self.entries[name] = entry
        self._metadata = self._describe()

    def _describe(self) -> Metadata:
        """The weights that are complete."""
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, str] = {}
        for ours, theirs in self.names.items():
            parts = parts_of(theirs)
            entries = [self.entries.get(part) for part in parts]
            first = entries[0]
            if first is None or None in entries or first.dtype not in _NAMED:
                continue
            stack = () if isinstance(theirs, str) else (len(parts),)
            size = torch.Size((*stack, *first.shape))
            part_size = torch.Size((*(1 for _ in stack), *first.shape))
            zeros = (0,) * len(first.shape)
            chunks = []
            for i, part in enumerate(parts):
                offset = torch.Size((i, *zeros) if stack else zeros)
                chunks.append(ChunkStorageMetadata(offset, part_size))
                places[MetadataIndex(ours, offset)] = part
            properties = TensorProperties(dtype=_NAMED[first.dtype])
            tensors[ours] = TensorStorageMetadata(properties, size, chunks)
        about = StorageMeta(load_id=self.load_id)
        return Metadata(tensors, storage_data=places, storage_meta=about)

    def read_metadata(self) -> Metadata:
        return self._metadata

    def load(self, state: dict[str, Tensor]) -> None:
        """Fill tensors in place, sharded ones too, and of other dtypes than the stored ones.

        Raises:
            CheckpointError: one can't be read, or holds NaN or infinity.
        """
        with alone(), unwrapped():  # pipeline ranks load different weights
            dcp.load(dict(state), storage_reader=self, no_dist=True)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        pieces = []
        for item in plan.items:
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            slices = tuple(slice(start, start + length) for start, length in ends)
            part = self.storage_data[item.storage_index]
            pieces.append(_Piece(part, slices, planner.resolve_tensor(item).detach()))
        self._fill(pieces)
        for item, piece in zip(plan.items, pieces, strict=True):
            planner.commit_tensor(item, piece.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read(self, name: str) -> Tensor:
        """The whole of our weight `name`, in its stored dtype.

        Raises:
            CheckpointError: it can't be read, or holds NaN or infinity.
        """
        about = self._metadata.state_dict_metadata[name]
        theirs = self.names[name]
        out = torch.empty(about.size, dtype=about.properties.dtype)
        targets = [out] if isinstance(theirs, str) else out.unbind()
        pairs = zip(parts_of(theirs), targets, strict=True)
        self._fill([_Piece(part, (), target) for part, target in pairs])
        return out

    def _fill(self, pieces: Iterable[_Piece]) -> None:
        files: dict[str, list[tuple[_Piece, int]]] = {}
        for piece in pieces:
            entry = self.entries[piece.part]
            size = piece.target.numel() * _NAMED[entry.dtype].itemsize
            files.setdefault(entry.file, []).append((piece, size))
        for file, sized in files.items():
            # The pages that are read of a mapped file are this process's memory until it is closed.
            for batch in batches(sized, MAPPED_BYTES):
                self._fill_from(file, batch)

    def _fill_from(self, file: str, pieces: list[_Piece]) -> None:
        part = ""
        try:
            with safe_open(file, framework="pt") as content:
                for part, slices, target in pieces:
                    dims = len(self.entries[part].shape)  # one less than a stack has
                    value = content.get_slice(part)[slices[-dims:] if dims else ()]
                    target.copy_(self._checked(part, value).view(target.shape))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read {part} of {file}: {error}") from None

    def problems(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Why the folder can't fill our weights of these names and shapes."""
        nameless = [ours for ours in shapes if ours not in self.names]
        if nameless:
            return [f"{ours} has no name in Hugging Face's format" for ours in nameless]
        theirs = {ours: parts_of(self.names[ours]) for ours in shapes}
        missing = [p for parts in theirs.values() for p in parts if p not in self.entries]
        if missing:
            return [f"{part} is missing" for part in missing]
        out = []
        for ours, parts in theirs.items():
            stacked = not isinstance(self.names[ours], str)
            wanted = tuple(shapes[ours])[1 if stacked else 0 :]
            first = self.entries[parts[0]]
            for part in parts:
                entry = self.entries[part]
                kind = f"{part} has dtype {entry.dtype}"
                if entry.shape != wanted:
                    out.append(f"{part} is {list(entry.shape)}, should be {list(wanted)}")
                elif entry.dtype not in _NAMED:
                    out.append(f"{kind}, must be one of {', '.join(_NAMED)}")
                elif entry.dtype != first.dtype:
                    out.append(f"{kind}, {parts[0]} of the same stack {first.dtype}")
        return out

    def _checked(self, name: str, value: Tensor) -> Tensor:
        if value.numel():
            # The reductions need no copy; NaN prevails in both.
            comparable = value.float() if value.itemsize == 1 else value
            extremes = torch.stack(torch.aminmax(comparable))
            if not extremes.isfinite().all():
                file = self.entries[name].file
                raise CheckpointError(
                    f"{file}: {name} holds NaN or infinity; download the model again"
                )
        return value


def batches(sizes: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Items in order, in lists whose sizes sum to at most `limit`; larger items are alone."""
    batch: list[T] = []
    total = 0
    for item, size in sizes:
        if batch and total + size > limit:
            yield batch
            batch = []
            total = 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of a file.

    Raises:
        CheckpointError: it is not a regular file, or not sound.
    """
    if not file.is_file():
        problem = "is not a regular file" if file.exists() else "is missing"
        raise CheckpointError(f"{file} {problem}")
    try:
        with safe_open(file, framework="pt") as content:
            if "DCP_SHARDING_INFO" in (content.metadata() or {}):
                raise CheckpointError(
                    f"{file} holds shards of torch's writer; "
                    "consolidate them into whole tensors first"
                )
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 - not a dictionary
            return {
                name: _Entry(str(file), tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged, or not safetensors: {error}") from None
