"""Features that exclude each other."""

from collections.abc import Callable, Sequence

from torchtitan.config.converters import FLOAT8, GROUPED_FLOAT8, GROUPED_MX, MX, uses
from torchtitan.config.derive import (
    compiles_blocks,
    gradient_accumulation_steps,
    selects_operations,
)
from torchtitan.config.pipeline_schedules import splits_backward
from torchtitan.config.rules.table import Facts, refuse, rule
from torchtitan.config.sections.schema import Config

_EARLY_STEP = "optimizer.early_step_in_backward"


def _early_step_excludes(
    key: str, when: Callable[[Config], bool], because: str, needs: Sequence[str] = ("world",)
) -> None:
    refuse(
        _EARLY_STEP,
        key,
        when=lambda c: c.optimizer.early_step_in_backward and when(c),
        because=f"{_EARLY_STEP}: {because}",
        needs=needs,
    )


_early_step_excludes(
    "parallelism.pipeline_parallel_degree",
    lambda c: c.parallelism.pipeline_parallel_degree > 1,
    "a pipeline schedule accumulates gradients over microbatches, so none is complete before the "
    "last backward ends; set it to false, or parallelism.pipeline_parallel_degree = 1",
)
_early_step_excludes(
    "training.max_norm",
    lambda c: c.training.max_norm > 0,
    "gradients can't be clipped to training.max_norm, because the global norm is known only after "
    "the backward; set training.max_norm = 0, or early_step_in_backward = false",
)
_early_step_excludes(
    "fault_tolerance.elastic",
    lambda c: c.fault_tolerance.elastic,
    "fewer ranks would need to accumulate gradients, but each backward applies and frees them; "
    "set it to false, or fault_tolerance.elastic = false",
)
_early_step_excludes(
    "training.on_nonfinite",
    lambda c: c.training.on_nonfinite == "skip",
    'a bad step is applied before it can be detected; set training.on_nonfinite = "stop", or '
    "early_step_in_backward = false",
)
_early_step_excludes(
    "guard.policy",
    lambda c: c.guard.policy == "skip",
    'a spike is applied before it can be detected; set guard.policy = "rewind", or '
    "early_step_in_backward = false",
)
_early_step_excludes(
    "training.global_batch_size",
    lambda c: gradient_accumulation_steps(c) > 1,
    "gradients can't be accumulated, because each backward applies and frees them; raise "
    "training.local_batch_size until one backward covers global_batch_size, or set "
    "early_step_in_backward = false",
    needs=["layout"],
)

refuse(
    "activation_checkpoint.selective_ac_option",
    "activation_checkpoint.mode",
    "compile.enable",
    "parallelism.pipeline_parallel_schedule",
    when=lambda c: (
        selects_operations(c.activation_checkpoint)
        and splits_backward(c.parallelism)
        and not compiles_blocks(c)
    ),
    because=(
        "activation_checkpoint.selective_ac_option: this pipeline schedule runs a block's "
        "backward in two parts, and unless the block is compiled, what `op` keeps is available to "
        'only one of them; set compile.enable = true, or a number, or mode = "full"'
    ),
)

refuse(
    "activation_checkpoint.mode",
    "parallelism.tensor_parallel_degree",
    when=lambda c: (
        c.activation_checkpoint.mode == "memory_budget" and c.parallelism.tensor_parallel_degree > 1
    ),
    because=(
        "activation_checkpoint.mode: with a memory budget, torch's partitioner fails on the "
        'device mesh that tensor parallelism puts into the graph; set mode = "selective" with '
        'selective_ac_option = "op", or parallelism.tensor_parallel_degree = 1'
    ),
)


@rule("parallelism.fsdp_buffers", needs=["device", "old_torch"])
def fsdp_buffers_need_nccl(config: Config, facts: Facts) -> str | None:
    works = facts.device.capability != (0, 0) and not facts.old_torch
    if works or config.parallelism.fsdp_buffers == "default":
        return None
    return (
        "parallelism.fsdp_buffers: only GPUs have a choice, with torch 2.13 or newer; set it to "
        '"default"'
    )


@rule("parallelism.pipeline_parallel_schedule", "compile.enable", needs=["old_torch"])
def old_torch_cannot_split_every_backward(config: Config, facts: Facts) -> str | None:
    has_chunks = config.training.loss_chunks > 1
    is_affected = compiles_blocks(config) or has_chunks or bool(config.model.converters)
    if not (facts.old_torch and splits_backward(config.parallelism) and is_affected):
        return None
    return (
        "parallelism.pipeline_parallel_schedule: with torch before 2.13, the backward of compiled "
        "blocks, a chunked loss or converted layers can't run in the two parts that this schedule "
        "needs; upgrade torch, or set Interleaved1F1B, or compile.enable = false, "
        "training.loss_chunks = 1 and model.converters = []"
    )


refuse(
    "parallelism.enable_async_tensor_parallel",
    "parallelism.tensor_parallel_degree",
    "compile.backend",
    "compile.enable",
    when=lambda c: (
        c.parallelism.enable_async_tensor_parallel
        and c.parallelism.tensor_parallel_degree > 1
        and not (compiles_blocks(c) and c.compile.backend == "inductor")
    ),
    because=(
        "parallelism.enable_async_tensor_parallel is implemented by inductor; set compile.enable "
        '= true, with "model" in compile.components and backend = "inductor", or '
        "enable_async_tensor_parallel = false"
    ),
)

refuse(
    "activation_checkpoint.mode",
    "compile.enable",
    when=lambda c: c.activation_checkpoint.mode == "memory_budget" and not compiles_blocks(c),
    because=(
        'activation_checkpoint.mode = "memory_budget" is implemented by the compiler; set '
        'compile.enable = true, with "model" in compile.components, or another mode'
    ),
)

refuse(
    "model.converters",
    when=lambda c: uses(c, FLOAT8) and uses(c, MX),
    because=('model.converters: "float8" and "mx" would convert the same layers; keep one'),
)

refuse(
    "model.converters",
    when=lambda c: uses(c, GROUPED_FLOAT8) and uses(c, GROUPED_MX),
    because=(
        'model.converters: "quantize.grouped_mm.float8" and "quantize.grouped_mm.mx" would '
        "convert the same experts; keep one"
    ),
)

refuse(
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.recipe_name",
    "model.converters",
    when=lambda c: (
        uses(c, FLOAT8)
        and c.quantize.linear.float8.enable_fsdp_float8_all_gather
        and c.quantize.linear.float8.recipe_name not in (None, "tensorwise")
    ),
    because=(
        "quantize.linear.float8.enable_fsdp_float8_all_gather needs one scale per weight; set "
        'recipe_name = "tensorwise", or enable_fsdp_float8_all_gather = false'
    ),
)

refuse(
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "model.converters",
    when=lambda c: (
        uses(c, FLOAT8)
        and c.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
        and not c.quantize.linear.float8.enable_fsdp_float8_all_gather
    ),
    because=(
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp has no effect without "
        "enable_fsdp_float8_all_gather = true"
    ),
)

refuse(
    "optimizer.state_dtype",
    "optimizer.name",
    when=lambda c: c.optimizer.state_dtype == "bfloat16" and c.optimizer.name == "Muon",
    because=(
        'optimizer.state_dtype: Muon has no bf16 state; set "float32", or optimizer.name = "AdamW"'
    ),
)

refuse(
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.pipeline_parallel_degree",
    when=lambda c: (
        c.parallelism.fsdp_reshard_after_forward == "always"
        and c.parallelism.pipeline_parallel_degree > 1
    ),
    because=(
        'parallelism.fsdp_reshard_after_forward: "always" would free weights that a pipeline '
        'schedule keeps gathered for all microbatches of a stage; set "default" or "never"'
    ),
)

refuse(
    "activation_checkpoint.offload_blocks",
    "parallelism.pipeline_parallel_schedule",
    when=lambda c: c.activation_checkpoint.offload_blocks != 0 and splits_backward(c.parallelism),
    because=(
        "activation_checkpoint.offload_blocks: a schedule that splits the backward needs "
        "activations twice, and would keep them on the device in between; set it to 0, or choose "
        "another schedule"
    ),
)

refuse(
    "parallelism.fsdp_reduce_once_per_step",
    "parallelism.pipeline_parallel_degree",
    when=lambda c: (
        c.parallelism.fsdp_reduce_once_per_step and c.parallelism.pipeline_parallel_degree > 1
    ),
    because=(
        "parallelism.fsdp_reduce_once_per_step: a pipeline's schedule reduces gradients after "
        "each batch; set it to false, and raise training.local_batch_size for fewer batches"
    ),
)

refuse(
    "training.mixed_precision_reduce",
    "parallelism.pipeline_parallel_degree",
    "parallelism.fsdp_reduce_once_per_step",
    when=lambda c: (
        c.training.mixed_precision_reduce == "bfloat16"
        and (c.parallelism.pipeline_parallel_degree > 1 or c.parallelism.fsdp_reduce_once_per_step)
    ),
    because=(
        "training.mixed_precision_reduce: the gradients of a pipeline's microbatches, and with "
        "parallelism.fsdp_reduce_once_per_step those of a step's batches, would add up in bf16 "
        'before they are reduced; set "float32", or pipeline_parallel_degree = 1 and '
        "fsdp_reduce_once_per_step = false"
    ),
)

refuse(
    "training.mixed_precision_reduce",
    "training.dtype",
    "fault_tolerance.elastic",
    "training.global_batch_size",
    when=lambda c: (
        c.training.mixed_precision_reduce == c.training.dtype == "bfloat16"
        and (gradient_accumulation_steps(c) > 1 or c.fault_tolerance.elastic)
    ),
    because=(
        "training.mixed_precision_reduce: with parameters stored in bf16, the gradients of a "
        "step's batches (of which fewer ranks of an elastic run have more) would add up in bf16; "
        'set "float32", or training.dtype = "float32"'
    ),
    needs=["layout"],
)

refuse(
    "training.dtype",
    "training.mixed_precision_param",
    when=lambda c: c.training.dtype == "bfloat16" and c.training.mixed_precision_param == "float32",
    because=(
        'training.dtype = "bfloat16" stores parameters with less precision than '
        'training.mixed_precision_param = "float32" computes in; set both to bfloat16, or dtype = '
        '"float32"'
    ),
)
