"""Grouped products of experts in 8-bit floating point, by torchao: rowwise Float8, and MXFP8.

The operands of all three products are rounded: in the forward, and in the backward for the inputs
and the weights. The scales are along the summed dimension; for the weights' gradients that is the
rows of one expert.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.config.converters import GROUPED_FLOAT8, GROUPED_MX, names_any, uses
from torchtitan.config.sections.schema import Config
from torchtitan.models.moe.grouped import grouped_mm
from torchtitan.models.moe.moe import Experts
from torchtitan.utils.logging import logger
from torchtitan.utils.torchao_compat import import_expert_kernels

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Like `grouped_mm(rows, weight, ends)`."""


def quantize_experts(model: nn.Module, config: Config) -> None:
    """Replace the products of experts of `model` according to `model.converters`."""
    if uses(config, GROUPED_FLOAT8 + GROUPED_MX):
        import_expert_kernels()
    float8 = config.quantize.grouped_mm.float8
    mx = config.quantize.grouped_mm.mx
    if uses(config, GROUPED_FLOAT8):
        product = emulated_float8 if float8.emulate else pad_groups(_float8, 16)
        suffix = " (emulated)" if float8.emulate else ""
        _convert(model, float8.fqns, product, f"Float8 rowwise{suffix}")
    if uses(config, GROUPED_MX):
        product = mxfp8(emulate=mx.recipe_name == "mxfp8_emulated")
        _convert(model, mx.fqns, pad_groups(product, 32), f"MXFP8 ({mx.recipe_name})")


def _convert(model: nn.Module, fqns: list[str], product: Product, what: str) -> None:
    blocks = 0
    num_converted = 0
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            blocks += 1
            if names_any(fqns, name):
                module.product = product
                num_converted += 1
    if blocks:
        logger.info(f"{what}: converted the experts of {num_converted} of {blocks} blocks")


def pad_groups(product: Product, multiple: int) -> Product:
    """`product` with each group's rows padded to a multiple of `multiple`, which its kernels need.

    Rows of zeros are appended to each group. Their total doesn't depend on the groups, so the host
    needn't wait for the device; the last group gets the remainder.
    """

    def round_up(size: Any) -> Any:
        return (size + multiple - 1) // multiple * multiple

    def padded_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        total = round_up(len(rows) + len(ends) * (multiple - 1))
        sizes = ends.diff(prepend=ends.new_zeros(1))
        padded_sizes = round_up(sizes)
        new_ends = padded_sizes.cumsum(0, dtype=ends.dtype)
        shifts = new_ends - padded_sizes - (ends - sizes)
        index = torch.arange(len(rows), device=rows.device)
        group = torch.searchsorted(ends, index, right=True, out_int32=True)
        # Rows outside all groups follow the last group, as zeros, so they don't contribute.
        is_outside = (group == len(ends)).unsqueeze(-1)
        index_in_padded = index + shifts[group.clamp_(max=len(ends) - 1)]
        new_ends[-1] = total
        rows = rows.masked_fill(is_outside, 0)
        padded_rows = rows.new_zeros(total, rows.shape[1]).index_copy(0, index_in_padded, rows)
        out = product(padded_rows, weight, new_ends).index_select(0, index_in_padded)
        return out.masked_fill(is_outside, 0)

    return padded_product


# ---- Float8


def _float8(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from torchao.prototype.moe_training.fp8_grouped_mm import (
        _to_fp8_rowwise_then_scaled_grouped_mm as product,
    )

    out = product(rows, weight.transpose(-2, -1), ends, pad_token_groups_for_grouped_mm=False)
    return out.to(rows.dtype)


def emulated_float8(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm` of operands rounded to e4m3 (arXiv:2209.05433), in their original type.

    As in torchao, scales are powers of two, so rounding changes the mantissa alone.
    """
    return _EmulatedFloat8.apply(rows, weight, ends)


class _EmulatedFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return grouped_mm(_round(rows, -1), _round(weight, -1), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        ops = torch.ops.torchtitan
        rows_gradient = ops.grouped_mm(_round(gradient, -1), _round(weight, 1), ends, True)
        rounded_gradient = _round_in_groups(gradient, ends)
        rounded_rows = _round_in_groups(rows, ends)
        return rows_gradient, ops.grouped_outer(rounded_gradient, rounded_rows, ends), None


def _round(x: Tensor, dim: int) -> Tensor:
    """`x` in e4m3, with a scale for each slice along `dim`."""
    return _to_e4m3(x, x.abs().amax(dim, keepdim=True))


def _round_in_groups(rows: Tensor, ends: Tensor) -> Tensor:
    """`rows` in e4m3, with a scale for each column of each group, and of the rows after them."""
    group = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    index = group.unsqueeze(-1).expand_as(rows)
    largest = rows.new_zeros(len(ends) + 1, rows.shape[1]).scatter_reduce(
        0, index, rows.abs(), "amax"
    )
    return _to_e4m3(rows, largest[group])


def _to_e4m3(x: Tensor, largest: Tensor) -> Tensor:
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = torch.exp2(torch.log2(limit / largest.float().clamp(min=1e-12)).floor())
    x_e4m3 = (x.float() * scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return (x_e4m3.float() / scale).to(x.dtype)


# ---- MXFP8


def mxfp8(*, emulate: bool) -> Product:
    """The product in MXFP8. torchao's emulation multiplies in bf16."""

    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_grouped_mm import (
            _to_mxfp8_then_scaled_grouped_mm as grouped_product,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
        out = grouped_product(
            rows.bfloat16(), weight.bfloat16().transpose(-2, -1), ends, kernel_preference=kernels
        )
        return out.to(rows.dtype)

    return product
