"""Which settings exclude each other: the table by which validation refuses combinations."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchtitan.config.derive import gradient_accumulation_steps
from torchtitan.config.sections.schema import Config
from torchtitan.utils.torch_compat import torch_is_before_2_13

FLOAT8 = ("float8", "quantize.linear.float8")
MX = ("mx", "quantize.linear.mx")
GROUPED_FLOAT8 = ("quantize.grouped_mm.float8",)
GROUPED_MX = ("quantize.grouped_mm.mx",)
"""Names in `model.converters`."""
SMALL_LAYERS = "auto_filter_small_kn"
"""In `quantize.linear.float8.filter_fqns`: skip layers too small to gain."""


def uses(config: Config, names: tuple[str, ...]) -> bool:
    """Whether `model.converters` holds one of `names`."""
    return not set(names).isdisjoint(config.model.converters)


def names_any(parts: Iterable[str], fqn: str) -> bool:
    """Whether one of `parts` names the module `fqn`: it is a part of its name."""
    return any(part in fqn for part in parts)


@dataclass(frozen=True)
class Conflict:
    """Settings that exclude each other."""

    applies: Callable[[Config], bool]
    message: str


def compiles_blocks(config: Config) -> bool:
    """Whether each transformer block is a compiled graph."""
    return config.compile.enable and "model" in config.compile.components


def splits_backward(config: Config) -> bool:
    """Whether the pipeline schedule runs the backward of inputs and of weights separately."""
    p = config.parallelism
    return p.pipeline_parallel_degree > 1 and (
        bool(p.pipeline_parallel_schedule_csv) or p.pipeline_parallel_schedule in _SPLITTING
    )


_SPLITTING = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

CONFLICTS = (
    Conflict(
        lambda c: c.optimizer.early_step_in_backward and c.parallelism.pipeline_parallel_degree > 1,
        "optimizer.early_step_in_backward: a pipeline schedule accumulates gradients "
        "over microbatches, so none is "
        "complete before the last backward ends; set it to false, or "
        "parallelism.pipeline_parallel_degree = 1",
    ),
    Conflict(
        lambda c: c.optimizer.early_step_in_backward and c.training.max_norm > 0,
        "optimizer.early_step_in_backward: gradients can't be clipped to "
        "training.max_norm, because the global norm is "
        "known only after the backward; set training.max_norm = 0, or "
        "early_step_in_backward = false",
    ),
    Conflict(
        lambda c: c.optimizer.early_step_in_backward and gradient_accumulation_steps(c) > 1,
        "optimizer.early_step_in_backward: gradients can't be accumulated, because each "
        "backward applies and frees "
        "them; raise training.local_batch_size until one backward covers global_batch_size, or set "
        "early_step_in_backward = false",
    ),
    Conflict(
        lambda c: c.optimizer.early_step_in_backward and c.fault_tolerance.elastic,
        "optimizer.early_step_in_backward: fewer ranks would need to accumulate "
        "gradients, but each backward applies "
        "and frees them; set it to false, or fault_tolerance.elastic = false",
    ),
    Conflict(
        lambda c: c.optimizer.early_step_in_backward and c.training.on_nonfinite == "skip",
        "optimizer.early_step_in_backward: a bad step is applied before it can be detected; set "
        'training.on_nonfinite = "stop", or early_step_in_backward = false',
    ),
    Conflict(
        lambda c: c.optimizer.early_step_in_backward and c.guard.policy == "skip",
        "optimizer.early_step_in_backward: a spike is applied before it can be detected; "
        "set guard.policy = "
        '"rewind", or early_step_in_backward = false',
    ),
    Conflict(
        lambda c: (
            c.activation_checkpoint.mode == "selective"
            and c.activation_checkpoint.selective_ac_option == "op"
            and splits_backward(c)
            and not compiles_blocks(c)
        ),
        "activation_checkpoint.selective_ac_option: this pipeline schedule runs a "
        "block's backward in two parts, and "
        "unless the block is compiled, what `op` keeps is available to only one of them; "
        "set compile.enable = true, or "
        'a number, or mode = "full"',
    ),
    Conflict(
        lambda c: (
            c.activation_checkpoint.mode == "memory_budget"
            and c.parallelism.tensor_parallel_degree > 1
        ),
        "activation_checkpoint.mode: with a memory budget, torch's partitioner fails on "
        "the device mesh that tensor "
        'parallelism puts into the graph; set mode = "selective" with '
        'selective_ac_option = "op", or '
        "parallelism.tensor_parallel_degree = 1",
    ),
    Conflict(
        lambda c: (
            splits_backward(c)
            and (compiles_blocks(c) or c.training.loss_chunks > 1 or bool(c.model.converters))
            and torch_is_before_2_13()
        ),
        "parallelism.pipeline_parallel_schedule: with torch before 2.13, the backward of "
        "compiled blocks, a chunked "
        "loss or converted layers can't run in the two parts that this schedule needs; "
        "upgrade torch, or set "
        "Interleaved1F1B, or compile.enable = false, training.loss_chunks = 1 and "
        "model.converters = []",
    ),
    Conflict(
        lambda c: (
            c.parallelism.enable_async_tensor_parallel
            and c.parallelism.tensor_parallel_degree > 1
            and not (compiles_blocks(c) and c.compile.backend == "inductor")
        ),
        "parallelism.enable_async_tensor_parallel is implemented by inductor; set "
        "compile.enable = true, with "
        '"model" in compile.components and backend = "inductor", or '
        "enable_async_tensor_parallel = false",
    ),
    Conflict(
        lambda c: c.activation_checkpoint.mode == "memory_budget" and not compiles_blocks(c),
        'activation_checkpoint.mode = "memory_budget" is implemented by the compiler; '
        "set compile.enable = true, with "
        '"model" in compile.components, or another mode',
    ),
    Conflict(
        lambda c: uses(c, FLOAT8) and uses(c, MX),
        'model.converters: "float8" and "mx" would convert the same layers; keep one',
    ),
    Conflict(
        lambda c: uses(c, GROUPED_FLOAT8) and uses(c, GROUPED_MX),
        'model.converters: "quantize.grouped_mm.float8" and "quantize.grouped_mm.mx" '
        "would convert the same experts; "
        "keep one",
    ),
    Conflict(
        lambda c: (
            uses(c, FLOAT8)
            and c.quantize.linear.float8.enable_fsdp_float8_all_gather
            and c.quantize.linear.float8.recipe_name not in (None, "tensorwise")
        ),
        "quantize.linear.float8.enable_fsdp_float8_all_gather needs one scale per "
        "weight; set recipe_name = "
        '"tensorwise", or enable_fsdp_float8_all_gather = false',
    ),
    Conflict(
        lambda c: (
            uses(c, FLOAT8)
            and c.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
            and not c.quantize.linear.float8.enable_fsdp_float8_all_gather
        ),
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp has no effect without "
        "enable_fsdp_float8_all_gather = true",
    ),
    Conflict(
        lambda c: c.optimizer.state_dtype == "bfloat16" and c.optimizer.name == "Muon",
        'optimizer.state_dtype: Muon has no bf16 state; set "float32", or optimizer.name = "AdamW"',
    ),
    Conflict(
        lambda c: (
            c.parallelism.fsdp_reshard_after_forward == "always"
            and c.parallelism.pipeline_parallel_degree > 1
        ),
        'parallelism.fsdp_reshard_after_forward: "always" would free weights that a '
        "pipeline schedule keeps gathered "
        'for all microbatches of a stage; set "default" or "never"',
    ),
    Conflict(
        lambda c: c.activation_checkpoint.offload_blocks != 0 and splits_backward(c),
        "activation_checkpoint.offload_blocks: a schedule that splits the backward needs "
        "activations twice, and "
        "would keep them on the device in between; set it to 0, or choose another schedule",
    ),
    Conflict(
        lambda c: (
            c.parallelism.fsdp_reduce_once_per_step and c.parallelism.pipeline_parallel_degree > 1
        ),
        "parallelism.fsdp_reduce_once_per_step: a pipeline's schedule reduces gradients "
        "after each batch; set it to "
        "false, and raise training.local_batch_size for fewer batches",
    ),
    Conflict(
        lambda c: (
            c.training.mixed_precision_reduce == "bfloat16"
            and (
                c.parallelism.pipeline_parallel_degree > 1
                or c.parallelism.fsdp_reduce_once_per_step
            )
        ),
        "training.mixed_precision_reduce: the gradients of a pipeline's microbatches, and with "
        "parallelism.fsdp_reduce_once_per_step those of a step's batches, would add up "
        "in bf16 before they are "
        'reduced; set "float32", or pipeline_parallel_degree = 1 and '
        "fsdp_reduce_once_per_step = false",
    ),
    Conflict(
        lambda c: (
            c.training.mixed_precision_reduce == c.training.dtype == "bfloat16"
            and (gradient_accumulation_steps(c) > 1 or c.fault_tolerance.elastic)
        ),
        "training.mixed_precision_reduce: with parameters stored in bf16, the gradients "
        "of a step's batches (of which "
        'fewer ranks of an elastic run have more) would add up in bf16; set "float32", '
        'or training.dtype = "float32"',
    ),
)


def gains_by_float8(recipe: str | None, inputs: int, outputs: int) -> bool:
    """Whether Float8 is faster for a layer of this size on an H100, by the measurements in
    torchao's float8 README.
    """
    if recipe in (None, "tensorwise"):
        return inputs > 4096 or outputs > 1024
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
