"""Reading the folder of a Hugging Face model, which may hold anything: `config.json` and safetensors.

Only regular files are opened, and nothing is unpickled. The library `safetensors` checks the headers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.json_files import read_json_object

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
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")


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
                f"no .safetensors files in {folder}, but {pickles[0]}: a pickle, which runs code when it is read. If "
                "you trust it, convert it with transformers: from_pretrained(...).save_pretrained(...)"
            )
        raise CheckpointError(
            f"no .safetensors files in {folder}, the folder of a Hugging Face model (checkpoint.initial_load_path, or "
            "model.hf_assets_path without it)"
        )
    try:
        names = sorted(set(_Index.model_validate(read_json_object(index)).weight_map.values()))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{index}: {'.'.join(map(str, first['loc']))[:200]}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name[:200]!r}, must name .safetensors files beside it")
    return [folder / name for name in names]


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file."""

    relative_path: str
    """As torch's reader calls it."""
    shape: tuple[int, ...]
    dtype: str


class SafetensorsReader(HuggingFaceStorageReader):
    """Torch's reader, with the headers read once and checked."""

    def __init__(self, folder: Path):
        """
        Raises:
            CheckpointError: the folder has no safetensors, or one is damaged.
        """
        super().__init__(str(folder))
        self.folder = folder
        self.entries: dict[str, _Entry] = {}
        for file in _weight_files(folder):
            for name, entry in _read_header(file).items():
                if first := self.entries.get(name):
                    raise CheckpointError(f"{name} is in two files: {first.relative_path} and {file}")
                self.entries[name] = entry
        self._metadata = self._describe()

    def _describe(self) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _Entry] = {}
        for name, entry in self.entries.items():
            if dtype := _NAMED.get(entry.dtype):
                size, start = torch.Size(entry.shape), torch.Size([0] * len(entry.shape))
                chunk = ChunkStorageMetadata(start, size)
                tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
                places[MetadataIndex(name, start)] = entry
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read {self.folder}: {error}") from None

    def read(self, name: str) -> Tensor:
        """A whole weight.

        Raises:
            CheckpointError: it can't be read, or holds NaN or infinity.
        """
        file = self.entries[name].relative_path
        try:
            with safe_open(file, framework="pt") as content:
                return self.checked(name, content.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read {name} of {file}: {error}") from None

    def problems(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """What is missing for weights of these names and shapes, or of the wrong shape or dtype."""
        out = [f"{name} is missing" for name in shapes if name not in self.entries]
        for name, shape in shapes.items() if not out else ():
            entry = self.entries[name]
            if entry.shape != tuple(shape):
                out.append(f"{name} is {list(entry.shape)}, should be {list(shape)}")
            elif entry.dtype not in _NAMED:
                out.append(f"{name} has dtype {entry.dtype}, must be one of {', '.join(_NAMED)}")
        return out

    def checked(self, name: str, weight: Tensor) -> Tensor:
        """`weight`, which was read as `name`.

        Raises:
            CheckpointError: it holds NaN or infinity.
        """
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if local.numel():
            # The reductions need no copy; NaN prevails in both.
            extremes = torch.stack(torch.aminmax(local.float() if local.itemsize == 1 else local))
            if not extremes.isfinite().all():
                file = self.entries[name].relative_path
                raise CheckpointError(f"{file}: {name} holds NaN or infinity; download the model again")
        return weight


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the cause of the `CheckpointException`, which is no `Exception`, that DCP makes of every error."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of a file.

    Raises:
        CheckpointError: it is not a regular file, or not sound.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} {'is not a regular file' if file.exists() else 'is missing'}")
    try:
        with safe_open(file, framework="pt") as content:
            if "DCP_SHARDING_INFO" in (content.metadata() or {}):
                raise CheckpointError(
                    f"{file} holds shards of torch's writer; consolidate them into whole tensors first"
                )
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 - not a dictionary
            return {name: _Entry(str(file), tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged, or not safetensors: {error}") from None
