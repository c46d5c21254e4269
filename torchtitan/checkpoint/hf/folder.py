"""Reading `config.json` and the safetensors of a Hugging Face model's folder.

The folder may come from anyone: only regular files are opened, and nothing is unpickled. The
library `safetensors` checks the headers.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from torchtitan.checkpoint.hf.pieces import blocks, full_box, their_box, to_ours, within
from torchtitan.checkpoint.hf.tensors import (
    DTYPES_BY_NAME,
    Box,
    FileTensor,
    FolderTensor,
    OpenSafetensors,
    dequantize,
    shape_of,
)
from torchtitan.checkpoint.load import unwrap_errors, without_dist_warning
from torchtitan.models.hf.agreement import with_text_config
from torchtitan.models.hf.quantization import (
    QUANTIZER_FILES,
    Quantization,
    check_quantizer_file,
    read_quantization,
)
from torchtitan.models.hf_names import HFNames, HFSlice, hf_slices, is_stack
from torchtitan.utils.errors import CheckpointError
from torchtitan.utils.files import regular_handle
from torchtitan.utils.formats import read_json_object

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ELEMENTS = 2**21
"""Elements that are read at a time."""
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
            f"{folder} is not the folder of a Hugging Face model: {error}; "
            "download one, for example with scripts/download_hf_assets.py of the repository"
        ) from None
    _weight_files(folder)
    return config


class _Index(BaseModel):
    """The index of a folder of several files: the file of each weight."""

    model_config = {"strict": True}

    weight_map: dict[str, str]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors in the folder's index, or `model.safetensors`, or all.

    Raises:
        CheckpointError: there are none, or the index is damaged or names files elsewhere.
    """
    index = folder / _INDEX
    if not index.exists():
        if (folder / _WHOLE).exists():
            return [folder / _WHOLE]  # as transformers does
        if files := sorted(folder.glob("*.safetensors")):
            return files
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
        key = ".".join(map(str, first["loc"]))[:200]
        raise CheckpointError(f"{index}: {key}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name[:200]!r}, must name .safetensors files beside it"
            )
    if (folder / _WHOLE).exists() and _WHOLE not in names:
        raise CheckpointError(
            f"{folder} holds two models: {_WHOLE}, which transformers would read, and the files "
            f"that {_INDEX} names; delete those of the wrong one"
        )
    return [folder / name for name in names]


class _Piece(NamedTuple):
    """A box to read of one of Hugging Face's tensors, and the tensor to fill with it."""

    hf_slice: HFSlice
    box: Box
    """A box of our tensor, without the dimension of a stack."""
    target: Tensor


class SafetensorsReader(HuggingFaceStorageReader):
    """Reads weights under our names. Only the slices that a rank needs are read, a few megabytes at
    a time. Quantized weights are dequantized.

    In DCP's metadata, a stack is a tensor with one chunk for each of Hugging Face's tensors.
    """

    def __init__(self, folder: Path, names: HFNames):
        """
        Raises:
            CheckpointError: the folder has no safetensors, one is damaged, or their quantization is
                unsupported or differs from `config.json`.
        """
        super().__init__(str(folder))
        self.folder = folder
        self.names = names
        self.slices = {ours: hf_slices(theirs) for ours, theirs in names.items()}
        entries: dict[str, FileTensor] = {}
        files = _weight_files(folder)
        self.extra_files = sorted({*folder.glob("*.safetensors")} - {*files})
        """Files that aren't read, such as an adapter, or the weights under other names."""
        for file in files:
            for key, entry in _read_header(file).items():
                name = _text_model_name(key)
                if first := entries.get(name):
                    raise CheckpointError(f"{name} is in two files: {first.file} and {file}")
                entries[name] = entry
        self.quantization = _quantization(folder)
        self.entries = dequantize(entries, self.quantization)
        """The folder's tensors, by their names in a text model."""
        self._metadata = self._describe()

    def _describe(self) -> Metadata:
        """DCP's metadata of the complete weights."""
        tensors: dict[str, TensorStorageMetadata] = {}
        slices_by_index: dict[MetadataIndex, HFSlice] = {}
        for ours, slices in self.slices.items():
            entries = [self.entries.get(hf_slice.name) for hf_slice in slices]
            first = entries[0]
            if first is None or None in entries or first.dtype not in DTYPES_BY_NAME:
                continue
            shape = slices[0].our_shape(first.shape)
            stack = (len(slices),) if is_stack(self.names[ours]) else ()
            chunk_size = torch.Size((*(1 for _ in stack), *shape))
            zeros = (0,) * len(shape)
            chunks = []
            for i, hf_slice in enumerate(slices):
                offset = torch.Size((i, *zeros) if stack else zeros)
                chunks.append(ChunkStorageMetadata(offset, chunk_size))
                slices_by_index[MetadataIndex(ours, offset)] = hf_slice
            dtype = torch.float32 if slices[0].buffer else DTYPES_BY_NAME[first.dtype]
            properties = TensorProperties(dtype=dtype)
            tensors[ours] = TensorStorageMetadata(properties, torch.Size((*stack, *shape)), chunks)
        return Metadata(
            tensors, storage_data=slices_by_index, storage_meta=StorageMeta(load_id=self.load_id)
        )

    def read_metadata(self) -> Metadata:
        return self._metadata

    def load(self, state: dict[str, Tensor]) -> None:
        """Fill tensors in place, which may be sharded, and differ in dtype from the files.

        Raises:
            CheckpointError: a tensor can't be read, or holds NaN or infinity.
        """
        with without_dist_warning(), unwrap_errors():  # pipeline ranks load different weights
            dcp.load(dict(state), storage_reader=self, no_dist=True)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        pieces = []
        targets = []
        for item in plan.items:
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            box = tuple(slice(start, start + length) for start, length in ends)
            target = planner.resolve_tensor(item).detach()
            stacked = is_stack(self.names[item.storage_index.fqn])
            hf_slice = self.storage_data[item.storage_index]
            piece = (box[1:], target.squeeze(0)) if stacked else (box, target)
            pieces.append(_Piece(hf_slice, *piece))
            targets.append(target)
        self._fill(pieces)
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Our weight `name`, or a box of it, in its stored dtype; buffers in fp32.

        Raises:
            CheckpointError: it can't be read, or holds NaN or infinity.
        """
        tensor = self._metadata.state_dict_metadata[name]
        box = full_box(tensor.size) if box is None else box
        out = torch.empty(shape_of(box), dtype=tensor.properties.dtype)
        slices = self.slices[name]
        if is_stack(self.names[name]):
            pairs = zip(slices[box[0]], out.unbind(), strict=True)
            self._fill(_Piece(hf_slice, box[1:], target) for hf_slice, target in pairs)
        else:
            self._fill([_Piece(slices[0], box, out)])
        return out

    def _fill(self, pieces: Iterable[_Piece]) -> None:
        """Read the pieces, ordered by file, so that few files are opened more than once."""
        by_file = sorted(pieces, key=lambda piece: self.entries[piece.hf_slice.name].file)
        with OpenSafetensors() as files:
            for hf_slice, box, target in by_file:
                if not target.numel():
                    continue
                for block in blocks(box, _ELEMENTS // (hf_slice.of // hf_slice.width)):
                    tensor = self.entries[hf_slice.name]
                    value = tensor.read(files, their_box(hf_slice, block))
                    value = to_ours(hf_slice, _check_finite(tensor, value), block)
                    target[within(block, box)].copy_(value)

    def equal(self, name: str, other_name: str) -> bool:
        """Whether two of the folder's tensors hold the same values."""
        tensor, other = self.entries[name], self.entries[other_name]
        if tensor.shape != other.shape:
            return False
        with OpenSafetensors() as files:
            return all(
                torch.equal(tensor.read(files, box).float(), other.read(files, box).float())
                for box in blocks(full_box(tensor.shape), _ELEMENTS)
            )

    def problems(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """The reasons why the folder can't fill our weights of these names and shapes."""
        nameless = [ours for ours in shapes if ours not in self.names]
        if nameless:
            return [f"{ours} has no name in Hugging Face's format" for ours in nameless]
        names = [hf_slice.name for ours in shapes for hf_slice in self.slices[ours]]
        problems = [
            f"{name} is missing" for name in dict.fromkeys(names) if name not in self.entries
        ]
        if problems:
            return problems
        for ours, shape in shapes.items():
            slices = self.slices[ours]
            first = self.entries[slices[0].name]
            piece_shape = tuple(shape)[1 if is_stack(self.names[ours]) else 0 :]
            for hf_slice in slices:
                entry = self.entries[hf_slice.name]
                expected = hf_slice.their_shape(piece_shape)
                kind = f"{hf_slice.name} has dtype {entry.dtype}"
                if entry.shape != expected:
                    problems.append(
                        f"{hf_slice.name} is {list(entry.shape)}, should be {list(expected)}"
                    )
                elif entry.dtype not in DTYPES_BY_NAME:
                    problems.append(f"{kind}, must be one of {', '.join(DTYPES_BY_NAME)}")
                elif entry.dtype != first.dtype:
                    problems.append(f"{kind}, {slices[0].name} of the same stack {first.dtype}")
        return problems


def _check_finite(tensor: FolderTensor, value: Tensor) -> Tensor:
    """Return `value`.

    Raises:
        CheckpointError: it holds NaN or infinity.
    """
    # The reductions need no copy; NaN prevails in both.
    comparable = value.float() if value.itemsize == 1 else value
    if not torch.stack(torch.aminmax(comparable)).isfinite().all():
        name = " or ".join(tensor.names)
        raise CheckpointError(
            f"{tensor.file}: {name} holds NaN or infinity; download the model again"
        )
    return value


def _quantization(folder: Path) -> Quantization | None:
    """
    Raises:
        CheckpointError: `config.json` is damaged, its quantization is unsupported, or another file
            contradicts it.
    """
    name, quantization = "config.json", None
    try:
        if (folder / name).exists():
            config = with_text_config(read_json_object(folder / name), {"quantization_config"})
            name = "config.json: quantization_config"
            quantization = read_quantization(config.get("quantization_config"))
        for name in QUANTIZER_FILES:
            if (folder / name).exists():
                check_quantizer_file(name, read_json_object(folder / name), quantization)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {name}: {error}") from None
    return quantization


def batches(sizes: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Items in order, in lists whose sizes sum to at most `limit`; a larger item is alone in its
    list.
    """
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


def _text_model_name(name: str) -> str:
    """The tensor's name in a folder with only the text model. The folder may hold more, such as a
    vision tower beside `language_model`.
    """
    for prefix, text_prefix in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name


def _read_header(file: Path) -> dict[str, FileTensor]:
    """The tensors of a file.

    Raises:
        CheckpointError: it is not a regular file, a pointer of git-lfs, or damaged.
    """
    try:
        os.close(regular_handle(file, links=True))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    try:
        with safe_open(file, framework="pt") as content:
            if "DCP_SHARDING_INFO" in (content.metadata() or {}):
                raise CheckpointError(
                    f"{file} holds shards of torch's writer; consolidate them into whole tensors "
                    "first"
                )
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 - not a dictionary
            return {
                name: FileTensor(name, str(file), tuple(tensor.get_shape()), tensor.get_dtype())
                for name, tensor in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged, or not safetensors: {error}") from None
