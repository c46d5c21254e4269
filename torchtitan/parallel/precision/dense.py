"""Linear layers in 8-bit floating point, by torchao.

Float8 (Micikevicius et al., arXiv:2209.05433) and MXFP8 (OCP Microscaling Formats, v1.0) change
only the operands of matrix products; weights and optimizer state keep their type.

Emulation rounds the operands to 8 bits and multiplies them in their original type: the same numbers
on any device, but no faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan.config.converters import FLOAT8, MX, converts_linear, uses
from torchtitan.config.rules import ABSENT, Accelerator, Facts, check
from torchtitan.config.sections.schema import Config
from torchtitan.models.spec import ShardingStyle
from torchtitan.parallel.memory.regather import ColumnsOfGathered, gather_sequence
from torchtitan.parallel.precision.experts import quantize_experts
from torchtitan.utils.logging import logger
from torchtitan.utils.torch_compat import silence_false_alarms
from torchtitan.utils.torchao_compat import (
    gather_float8_as_bytes,
    import_expert_kernels,
    rows_for_empty_float8_shards,
    send_padded_float8_shards,
)


def check_hardware(
    config: Config, device: torch.device, expert_sizes: Mapping[str, int] | None = None
) -> None:
    """Check that `device` supports the types and sizes of the run.

    Args:
        expert_sizes: `ModelSpec.expert_sizes`, if known.

    Raises:
        ConfigError: it doesn't.
    """
    if device.type == "cuda":
        accelerator = Accelerator(
            torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        )
    else:
        accelerator = Accelerator("a CPU", (0, 0))
    sizes = ABSENT if expert_sizes is None else expert_sizes
    check(config, Facts(device=accelerator, expert_sizes=sizes))


def quantize(model: nn.Module, config: Config) -> None:
    """Convert layers of `model`, on the meta device and unsharded, as `model.converters` asks."""
    silence_false_alarms()
    if uses(config, FLOAT8):
        _to_float8(model, config)
    if uses(config, MX):
        _to_mx(model, config)
    quantize_experts(model, config)
    if config.model.converters and config.model.print_after_conversion:
        logger.info(f"Model after conversion:\n{model}")


def _report(model: nn.Module, kind: type, what: str) -> None:
    """Log how many linear layers were converted to the class `kind`, and which were not."""
    other_names = []
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            count += 1
            if not isinstance(module, kind):
                other_names.append(name)
    if len(other_names) < count:
        exceptions = f", all but {', '.join(other_names[:6])}" if other_names else ""
        more = ", ..." if len(other_names) > 6 else ""
        num_converted = count - len(other_names)
        logger.info(f"{what}: converted {num_converted} of {count} linear layers{exceptions}{more}")
    elif other_names not in ([], ["output"]):  # not a pipeline stage without blocks
        logger.warning(f"{what}: converted no linear layer; all are excluded by name or size")


# ---- Float8


def _to_float8(model: nn.Module, config: Config) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    float8 = config.quantize.linear.float8
    recipe = float8.recipe_name or "tensorwise"

    def converts(module: Any, fqn: str) -> bool:
        return converts_linear(config, fqn, module.in_features, module.out_features)

    linear_config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=float8.emulate,
        enable_fsdp_float8_all_gather=float8.enable_fsdp_float8_all_gather,
    )
    convert_to_float8_training(model, config=linear_config, module_filter_fn=converts)
    if float8.emulate:
        gather_float8_as_bytes()
    if float8.enable_fsdp_float8_all_gather:
        send_padded_float8_shards()
    _report(model, Float8Linear, f"Float8 {recipe}{' (emulated)' if float8.emulate else ''}")


def refresh_scales(models: Sequence[nn.Module]) -> None:
    """Compute the scales of all weights for the next step in one reduction, not one per weight."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    with rows_for_empty_float8_shards(models):
        for model in models:
            precompute_float8_dynamic_scale_for_fsdp(model)


SEQUENCE = Shard(1)


def as_sequence_shard(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor `[b, s, ...]` that is sharded over the sequence, as a DTensor."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [SEQUENCE], run_check=False)


class GatherSequenceInFloat8(ParallelStyle):
    """Rounds the first input to Float8 before all-gathering it: half the bytes of bf16."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from torchao.float8.config import e4m3_dtype
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        linear = _linear_layers(module)[0]

        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = hp_tensor_to_float8_dynamic(
                as_sequence_shard(inputs[0], device_mesh),
                e4m3_dtype,
                linear.linear_mm_config,
                gemm_input_role=GemmInputRole.INPUT,
            )
            return gather_sequence(x), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


def _linear_layers(module: nn.Module) -> list[nn.Module]:
    """The module itself if it is a linear layer, else its children that are."""
    modules = [module] if isinstance(module, nn.Linear) else module.children()
    return [child for child in modules if isinstance(child, nn.Linear)]


def float8_style(style: ShardingStyle, module: nn.Module) -> ParallelStyle | None:
    """The style that communicates in Float8; None unless all layers have one scale per tensor.

    Scales per row or column would have to be gathered too, so those recipes communicate in bf16.
    """
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    layers = _linear_layers(module)
    for layer in layers:
        if not isinstance(layer, Float8Linear):
            return None
        scaling = layer.config.cast_config_input.scaling_granularity
        if scaling != ScalingGranularity.TENSORWISE:
            return None
    if layers and style is ShardingStyle.COLUMNS:
        return ColumnsOfGathered(Float8ColwiseParallel())
    if layers and style is ShardingStyle.COLUMNS_OF_SEQUENCE:
        return ColumnsOfGathered(Float8ColwiseParallel(), GatherSequenceInFloat8())
    if layers and style is ShardingStyle.ROWS:
        return Float8RowwiseParallel(output_layouts=SEQUENCE)
    if layers and style is ShardingStyle.GATHER_SEQUENCE:
        return GatherSequenceInFloat8()
    return None


# ---- MXFP8


class MXLinear(nn.Linear):
    """A linear layer with MXFP8 operands.

    Each 32 elements along the summed dimension share a scale, a power of two.
    """

    kernels: tuple[object, ...]

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm

        kind = torch.float8_e4m3fn
        return mx_mm.apply(x, self.weight, kind, kind, kind, 32, *self.kernels, False)


def _to_mx(model: nn.Module, config: Config) -> None:
    from torchao.prototype.mx_formats import config as formats
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    import_expert_kernels()
    mx = config.quantize.linear.mx
    rounding = "rceil" if mx.recipe_name.endswith("rceil") else "floor"
    preference = KernelPreference.AUTO
    casts = ["triton", mx.mxfp8_dim1_cast_kernel_choice]
    if mx.recipe_name == "mxfp8_emulated":
        preference = KernelPreference.EMULATED
        casts = ["torch", "torch"]
    kernels = (
        preference,
        formats.MXFP8Dim0CastKernelChoice(casts[0]),
        formats.MXFP8Dim1CastKernelChoice(casts[1]),
        formats.ScaleCalculationMode(rounding),
    )
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if converts_linear(config, name, module.in_features, module.out_features):
            module.__class__ = MXLinear
            module.kernels = kernels
    _report(model, MXLinear, f"MXFP8 ({mx.recipe_name})")
