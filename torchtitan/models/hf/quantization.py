"""The quantized weights of Hugging Face that can be read, as `config.json` states them. Imports no
torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.utils.wording import brief


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
        raise ValueError(f"{_kind(about)} can't be read. {_WHAT_TO_DO}")
    block = about.get("weight_block_size", [128, 128])
    sizes = block if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"fp8 with weight_block_size {brief(block)} can't be read. {_WHAT_TO_DO}")
    if about.get("fmt", "e4m3") != "e4m3" or about.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(f"fp8 other than e4m3 can't be read: {brief(about)}. {_WHAT_TO_DO}")
    return Quantization("fp8", (sizes[0], sizes[1]))


def _kind(about: Any) -> str:
    """Weights that can't be read, in words: INT4 of compressed-tensors states its bits for each
    group of layers.
    """
    if not isinstance(about, dict) or "quant_method" not in about:
        return f"{brief(about)}, which names no quant_method,"
    groups = about.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    bits = about.get("bits")
    kind = "int"
    if isinstance(weights, dict):
        bits = weights.get("num_bits")
        kind = weights.get("type", kind)
    format_of = f"{str(kind)[:8].upper()}{bits} " if type(bits) is int else ""
    return f"{format_of}weights of quant_method {brief(about['quant_method'])}"


def check_quantization(about: Any) -> Any:
    """`about`, if `read_quantization` can read it.

    Raises:
        ValueError: as there.
    """
    read_quantization(about)
    return about


_WHAT_TO_DO = (
    "What can: quant_method 'fp8' with weight_block_size, and 'mxfp4'. Take the model's bfloat16 "
    "weights if they are published; else dequantize it with the tool that quantized it, and save "
    "it as bfloat16, without quantization_config"
)
