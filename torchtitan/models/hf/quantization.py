"""The kinds of quantized Hugging Face weights that can be read, from `quantization_config` of their
`config.json`. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.utils.wording import brief


@dataclass(frozen=True)
class Quantization:
    """The quantization of a folder's weights, which are dequantized to bfloat16 on reading."""

    method: Literal["fp8", "mxfp4"]
    """
    fp8     e4m3 with a scale for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3)
    mxfp4   e2m1 with a power of two for each 32 values (OCP Microscaling Formats, version 1.0)
    """
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block of fp8."""


def read_quantization(section: Any) -> Quantization | None:
    """The `quantization_config` of a `config.json`.

    Raises:
        ValueError: the kind can't be read. The message has the remedy.
    """
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method != "fp8":
        raise ValueError(f"{_kind(section)} can't be read. {_WHAT_TO_DO}")
    block = section.get("weight_block_size", [128, 128])
    sizes = block if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"fp8 with weight_block_size {brief(block)} can't be read. {_WHAT_TO_DO}")
    if section.get("fmt", "e4m3") != "e4m3" or section.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(f"fp8 other than e4m3 can't be read: {brief(section)}. {_WHAT_TO_DO}")
    return Quantization("fp8", (sizes[0], sizes[1]))


def _kind(section: Any) -> str:
    """Describe weights that can't be read. compressed-tensors has the bits of INT4 for each group
    of layers.
    """
    if not isinstance(section, dict) or "quant_method" not in section:
        return f"{brief(section)}, which names no quant_method,"
    groups = section.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    bits = section.get("bits")
    kind = "int"
    if isinstance(weights, dict):
        bits = weights.get("num_bits")
        kind = weights.get("type", kind)
    format_of = f"{str(kind)[:8].upper()}{bits} " if type(bits) is int else ""
    return f"{format_of}weights of quant_method {brief(section['quant_method'])}"


QUANTIZER_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files beside `config.json` in which NVIDIA's ModelOpt, GPTQ and AWQ describe their weights."""


def check_quantizer_file(
    name: str, contents: Mapping[str, Any], quantization: Quantization | None
) -> None:
    """Compare a quantizer's file with `config.json`.

    Args:
        quantization: from `config.json`.

    Raises:
        ValueError: the weights are quantized according to the file, but not to `config.json`.
    """
    details = contents.get("quantization", contents)
    algorithm = details.get("quant_algo") if isinstance(details, dict) else None
    if name == "hf_quant_config.json" and isinstance(details, dict) and algorithm is None:
        return  # only the cache is quantized
    if quantization and isinstance(algorithm, str) and quantization.method in algorithm.lower():
        return
    method = quantization.method if quantization else "nothing of it"
    raise ValueError(
        f"weights quantized as {brief(algorithm or details)} can't be read, and config.json says "
        f"{method}. {_WHAT_TO_DO}"
    )


def check_quantization(section: Any) -> Any:
    """`section`, if `read_quantization` can read it.

    Raises:
        ValueError: it can't.
    """
    read_quantization(section)
    return section


_WHAT_TO_DO = (
    "What can: quant_method 'fp8' with weight_block_size, and 'mxfp4'. Take the model's bfloat16 "
    "weights if they are published; else dequantize it with the tool that quantized it, and save "
    "it as bfloat16, without quantization_config"
)
