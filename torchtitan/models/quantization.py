"""The quantized weights of Hugging Face that can be read, as `config.json` states them. Imports no
torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.utils.text import brief

_READABLE = (
    "can be read: fp8 with scales of blocks (quant_method 'fp8', weight_block_size), and mxfp4"
)


@dataclass(frozen=True)
class Quantization:
    """How the weights of a folder are quantized. They are dequantized to bfloat16 on reading."""

    method: Literal["fp8", "mxfp4"]
    """
    fp8     e4m3 with a scale for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3)
    mxfp4   e2m1 with a power of two for each 32 values (OCP Microscaling Formats, version 1.0)
    """
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block of fp8."""


def read_quantization(about: Any) -> Quantization | None:
    """The `quantization_config` of a `config.json`.

    Raises:
        ValueError: it is of another kind. The message says what to do.
    """
    if about is None:
        return None
    method = about.get("quant_method") if isinstance(about, dict) else None
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method != "fp8":
        kind = f"weights quantized by {brief(method)}" if method else f"got {brief(about)}, which"
        raise ValueError(f"{kind} can't be read. {_WHAT_TO_DO}")
    block = about.get("weight_block_size", [128, 128])
    sizes = block if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"fp8 with weight_block_size {brief(block)} can't be read. {_WHAT_TO_DO}")
    kind = about.get("fmt", "e4m3")
    if kind != "e4m3" or about.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(f"fp8 other than e4m3 can't be read: {brief(about)}. {_WHAT_TO_DO}")
    return Quantization("fp8", (sizes[0], sizes[1]))


def check_quantization(about: Any) -> Any:
    """`about`, if `read_quantization` can read it.

    Raises:
        ValueError: as there.
    """
    read_quantization(about)
    return about


_WHAT_TO_DO = (
    f"What {_READABLE}. Take the model's bfloat16 weights if they are published; else dequantize "
    "them with the tool that wrote them, save them as bfloat16 without quantization_config, and "
    "read that folder"
)
