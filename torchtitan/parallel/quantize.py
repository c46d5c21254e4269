"""Linear layers in 8-bit floating point, by torchao: Float8 (Micikevicius et al., arXiv:2209.05433)
and MXFP8 (OCP Microscaling Formats, v1.0). Only the operands of matrix products change; weights and
optimizer state keep their type.

Emulation rounds the operands to 8 bits and multiplies them in their original type: the same numbers
on any device, but no faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan.config.rules.device import Accelerator, check_device
from torchtitan.config.rules.support import FLOAT8, MX, SMALL_LAYERS, gains_by_float8, uses
from torchtitan.config.sections.quantize import MXFP8, Float8
from torchtitan.config.sections.schema import Config
from torchtitan.parallel.quantize_experts import quantize_experts
from torchtitan.utils.logging import logger
from torchtitan.utils.torch_compat import silence_false_alarms
from torchtitan.utils.torchao_compat import (
    gather_float8_as_bytes,
    rows_for_empty_float8_shards,
    send_padded_float8_shards,
)


def check_hardware(config: Config, device: torch.device) -> None:
    """Check that `device` supports what `model.converters` needs.

    Raises:
        ConfigError: it doesn't.
    """
    if device.type == "cuda":
        found = Accelerator(
            torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        )
    else:
        found = Accelerator("a CPU", (0, 0))
    check_device(config, found)


def quantize(model: nn.Module, config: Config, tp_degree: int) -> None:
    """Convert layers of `model`, on the meta device and not yet sharded, according to
    `model.converters`.
    """
    silence_false_alarms()
    if uses(config, FLOAT8):
        _to_float8(model, config.quantize.linear.float8, tp_degree)
    if uses(config, MX):
        _to_mx(model, config.quantize.linear.mx, tp_degree)
    quantize_experts(model, config)
    if config.model.converters and config.model.print_after_conversion:
        logger.info(f"Model after conversion:\n{model}")


def _fits(excluded: Sequence[str], unit: int) -> Callable[[nn.Module, str], bool]:
    """A test whether to convert a layer: it is not excluded by name, and `unit` divides its
    sizes.
    """

    def fits(module: nn.Module, fqn: str) -> bool:
        if not isinstance(module, nn.Linear) or any(name in fqn for name in excluded):
            return False
        return module.in_features % unit == 0 and module.out_features % unit == 0

    return fits


def _report(model: nn.Module, kind: type, what: str) -> None:
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    kept = [name for name, module in linear.items() if not isinstance(module, kind)]
    if len(kept) == len(linear):
        if set(linear) - {"output"}:  # else it is a pipeline stage without blocks
            logger.warning(f"{what}: converted no linear layer; all are excluded by name or size")
        return
    names = f", all but {', '.join(kept[:6])}{', ...' if len(kept) > 6 else ''}" if kept else ""
    logger.info(
        f"{what}: converted {len(linear) - len(kept)} of {len(linear)} linear layers{names}"
    )


# ---- Float8


def _to_float8(model: nn.Module, float8: Float8, tp_degree: int) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    recipe = float8.recipe_name or "tensorwise"
    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=float8.emulate,
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather,
    )
    names = [name for name in float8.filter_fqns if name != SMALL_LAYERS]
    fits = _fits(names, 16 * tp_degree)

    def converts(module: Any, fqn: str) -> bool:
        large = SMALL_LAYERS not in float8.filter_fqns
        return fits(module, fqn) and (
            large or gains_by_float8(recipe, module.in_features, module.out_features)
        )

    convert_to_float8_training(model, config=config, module_filter_fn=converts)
    if float8.emulate:
        gather_float8_as_bytes()
    if float8.enable_fsdp_float8_all_gather:
        send_padded_float8_shards()
    _report(model, Float8Linear, f"Float8 {recipe}{' (emulated)' if float8.emulate else ''}")


def refresh_scales(models: Sequence[nn.Module]) -> None:
    """Compute the scales of all weights for the next step in one reduction, instead of one per
    weight.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    with rows_for_empty_float8_shards(models):
        for model in models:
            precompute_float8_dynamic_scale_for_fsdp(model)


class GatherSequenceInFloat8(ParallelStyle):
    """Rounds the first input to Float8 before all-gathering it along the sequence: half the bytes
    of bf16.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from torchao.float8.config import e4m3_dtype
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        layers: list[Any] = [child for child in module.children() if isinstance(child, nn.Linear)]

        def gathered(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs[0]
            x = (
                x
                if isinstance(x, DTensor)
                else DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False)
            )
            role = GemmInputRole.INPUT
            x = hp_tensor_to_float8_dynamic(
                x, e4m3_dtype, layers[0].linear_mm_config, gemm_input_role=role
            )
            return x.redistribute(placements=[Replicate()]), *inputs[1:]

        module.register_forward_pre_hook(gathered)
        return module


def float8_style(name: str, module: nn.Module) -> ParallelStyle | None:
    """The style that communicates in Float8; None if a layer isn't Float8 or has more than one
    scale per tensor.

    Scales of rows or columns would have to be gathered too, so those recipes communicate in bf16.
    """
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    layers = (
        [module]
        if isinstance(module, nn.Linear)
        else [m for m in module.children() if isinstance(m, nn.Linear)]
    )
    granularity = ScalingGranularity.TENSORWISE
    if not layers or not all(
        isinstance(layer, Float8Linear)
        and layer.config.cast_config_input.scaling_granularity == granularity
        for layer in layers
    ):
        return None
    if name == "columns":
        return Float8ColwiseParallel()
    if name == "rows":
        return Float8RowwiseParallel(output_layouts=Shard(1))
    return GatherSequenceInFloat8() if name == "gather_sequence" else None


# ---- MXFP8


class MXLinear(nn.Linear):
    """A linear layer with MXFP8 operands: every 32 elements along the summed dimension share a
    power-of-two scale.
    """

    kernels: tuple[Any, ...]

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm

        kind = torch.float8_e4m3fn
        return mx_mm.apply(x, self.weight, kind, kind, kind, 32, *self.kernels, False)


def _to_mx(model: nn.Module, mx: MXFP8, tp_degree: int) -> None:
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    emulate = mx.recipe_name == "mxfp8_emulated"
    cast = "torch" if emulate else mx.mxfp8_dim1_cast_kernel_choice
    kernels = (
        KernelPreference.EMULATED if emulate else KernelPreference.AUTO,
        config.MXFP8Dim0CastKernelChoice("torch" if emulate else "triton"),
        config.MXFP8Dim1CastKernelChoice(cast),
        config.ScaleCalculationMode("rceil" if mx.recipe_name.endswith("rceil") else "floor"),
    )
    fits = _fits(mx.filter_fqns, 32 * tp_degree)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and fits(module, name):
            module.__class__ = MXLinear
            module.kernels = kernels
    _report(model, MXLinear, f"MXFP8 ({mx.recipe_name})")
