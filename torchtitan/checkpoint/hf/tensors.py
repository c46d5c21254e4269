"""Tensors in safetensors files, read box by box. Quantized tensors are dequantized.

A box is a slice of each dimension, which may have a step. Only the box and the values it is
computed from are in memory.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan.models.hf.quantization import Quantization
from torchtitan.utils.errors import CheckpointError

Box = tuple[slice, ...]


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a box without steps."""
    return tuple(interval.stop - interval.start for interval in box)


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""safetensors' names of the dtypes of weights."""
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
MAPPED_BYTES = 32 * 2**20
_SCALES = ("F32", "BF16", "F8_E8M0")
"""Dtypes of the scales of fp8 blocks. The last is a power of two."""
_MXFP4_VALUES = 32
"""Number of values that share a scale."""


class OpenSafetensors(contextlib.AbstractContextManager["OpenSafetensors"]):
    """Open safetensors files. The pages of a mapped file are charged to this process until the
    file is closed, so all files are closed after every `MAPPED_BYTES`.
    """

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}
        self._read = 0

    def read(self, entry: "FileTensor", box: Box) -> Tensor:
        """A box of a tensor, mapped from its file.

        Raises:
            CheckpointError: it can't be read.
        """
        span = tuple(slice(interval.start, interval.stop) for interval in box)
        size = entry.itemsize
        for interval in span:
            size *= interval.stop - interval.start
        if self._read and self._read + size > MAPPED_BYTES:
            self.close()
        self._read += size
        try:
            if entry.file not in self._files:
                file = safe_open(entry.file, framework="pt")
                self._files[entry.file] = file.__enter__()
            value = self._files[entry.file].get_slice(entry.name)[span or ...]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read {entry.name} of {entry.file}: {error}") from None
        return value[tuple(slice(None, None, interval.step) for interval in box)]

    def close(self) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()
        self._read = 0

    def __exit__(self, *args: object) -> None:
        self.close()


class FolderTensor(Protocol):
    """A tensor of a folder, plain or quantized."""

    @property
    def file(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """safetensors' name of the dtype."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in files from which this one is computed."""
        ...

    def read(self, files: OpenSafetensors, box: Box) -> Tensor:
        """A box of the tensor, in its dtype.

        Raises:
            CheckpointError: it can't be read.
        """
        ...


@dataclass(frozen=True)
class FileTensor:
    """A plain tensor in a file."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def itemsize(self) -> int:
        return DTYPES_BY_NAME[self.dtype].itemsize if self.dtype in DTYPES_BY_NAME else 1

    def read(self, files: OpenSafetensors, box: Box) -> Tensor:
        return files.read(self, box)


@dataclass(frozen=True)
class Scaled:
    """A quantized tensor of a folder: its values, and their scales in another tensor."""

    values: FileTensor
    scales: FileTensor
    dtype = "BF16"

    @property
    def file(self) -> str:
        return self.values.file

    @property
    def names(self) -> tuple[str, ...]:
        return self.values.name, self.scales.name


@dataclass(frozen=True)
class BlockScaled(Scaled):
    """A matrix in e4m3 with a scale for each block of it (DeepSeek-V3, arXiv:2412.19437, section
    3.3). The last blocks may be smaller.
    """

    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, files: OpenSafetensors, box: Box) -> Tensor:
        strides = tuple(slice(None, None, interval.step) for interval in box)
        box = tuple(slice(interval.start, interval.stop) for interval in box)
        values = files.read(self.values, box).float()
        blocks = tuple(
            slice(interval.start // size, -(-interval.stop // size))
            for interval, size in zip(box, self.block, strict=True)
        )
        scale = files.read(self.scales, blocks).float()
        for dim, (interval, size) in enumerate(zip(box, self.block, strict=True)):
            base = interval.start // size * size
            entries = torch.arange(interval.start - base, interval.stop - base) // size
            scale = scale.index_select(dim, entries)
        return values.mul_(scale)[strides].bfloat16()


@dataclass(frozen=True)
class MXFP4(Scaled):
    """Stacked matrices of 4-bit floats; each 32 of a row share a power of two (OCP Microscaling
    Formats, version 1.0). A row in a file becomes a column here.

        values [..., rows, groups, 16] uint8, two values in a byte, the low half first
        scales [..., rows, groups] uint8, the exponent plus 127
        here   [..., groups * 32, rows]
    """

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, rows, groups, _ = self.values.shape
        return (*stack, groups * _MXFP4_VALUES, rows)

    def read(self, files: OpenSafetensors, box: Box) -> Tensor:
        *stack, inner, rows = box
        first = inner.start // _MXFP4_VALUES
        groups = slice(first, -(-inner.stop // _MXFP4_VALUES))
        group_bytes = slice(0, _MXFP4_VALUES // 2)
        packed = files.read(self.values, (*stack, rows, groups, group_bytes))
        values = _e2m1_pairs()[packed.int()].flatten(-2)
        exponents = files.read(self.scales, (*stack, rows, groups)).int()
        values *= _powers()[exponents].unsqueeze(-1)  # exact: it changes no mantissa
        base = first * _MXFP4_VALUES
        values = values.flatten(-2)[..., inner.start - base : inner.stop - base]
        return values.transpose(-2, -1)


@lru_cache(maxsize=1)
def _e2m1_pairs() -> Tensor:
    """`[256, 2]`, the two values of each byte. A value has a sign bit, two bits of exponent and one
    of mantissa.
    """
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.bfloat16)
    values = torch.cat((positive, -positive))
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)


@lru_cache(maxsize=1)
def _powers() -> Tensor:
    """`[256]`, the factor of each exponent; the last one is infinite."""
    return (2.0 ** (torch.arange(256, dtype=torch.float64) - 127)).bfloat16()


def dequantize(
    entries: Mapping[str, FileTensor], quantization: Quantization | None
) -> dict[str, FolderTensor]:
    """The tensors of a folder by name. A quantized tensor and its scales become one tensor with the
    name of the unquantized weight.

    Raises:
        CheckpointError: the scales of a quantized tensor are missing or don't fit its blocks, or
            `config.json` has no such quantization.
    """
    tensors: dict[str, FolderTensor] = dict(entries)
    method = quantization.method if quantization else None
    for name, entry in entries.items():
        weight = name.removesuffix("_scale_inv")
        if weight != name and weight in entries:
            _check_method("fp8", method, entry)
            assert quantization is not None
            tensors[weight] = _block_scaled(entries[weight], entry, quantization.block)
            del tensors[name]
        elif entry.dtype == "F8_E4M3" and method == "fp8" and f"{name}_scale_inv" not in entries:
            raise CheckpointError(f"{entry.file}: {name} is fp8 and has no {name}_scale_inv")
        elif entry.dtype == "U8" and name.endswith("_blocks"):
            _check_method("mxfp4", method, entry)
            stem = name.removesuffix("_blocks")
            tensors[stem] = _mxfp4(entry, entries.get(f"{stem}_scales"))
            del tensors[name], tensors[f"{stem}_scales"]
    return tensors


def _check_method(method: str, config_method: str | None, entry: FileTensor) -> None:
    if config_method != method:
        raise CheckpointError(
            f"{entry.file}: {entry.name} is {method}, but config.json has no quantization_config "
            f'of quant_method "{method}"; take the config.json of the same download'
        )


def _block_scaled(weight: FileTensor, scale: FileTensor, block: tuple[int, int]) -> BlockScaled:
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2 or scale.dtype not in _SCALES:
        kinds = f"{weight.dtype} {list(weight.shape)} with scales of {scale.dtype}"
        raise CheckpointError(f"{weight.file}: {weight.name} is {kinds}, not fp8 with fp32 scales")
    blocks = tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    if scale.shape != blocks:
        raise CheckpointError(
            f"{scale.file}: {scale.name} is {list(scale.shape)}, should be {list(blocks)}: one for "
            f"each {block[0]} x {block[1]} of {list(weight.shape)}"
        )
    return BlockScaled(weight, scale, block)


def _mxfp4(blocks: FileTensor, scales: FileTensor | None) -> MXFP4:
    if scales is None:
        name = blocks.name.removesuffix("_blocks")
        raise CheckpointError(f"{blocks.file}: {blocks.name} has no {name}_scales")
    sound = len(blocks.shape) >= 3 and blocks.shape[-1] == _MXFP4_VALUES // 2
    if not sound or scales.dtype != "U8" or scales.shape != blocks.shape[:-1]:
        raise CheckpointError(
            f"{blocks.file}: {blocks.name} is {list(blocks.shape)} with scales "
            f"{list(scales.shape)} of {scales.dtype}, should be [..., 16] of uint8 with a scale "
            "of uint8 for each 16 bytes"
        )
    return MXFP4(blocks, scales)
