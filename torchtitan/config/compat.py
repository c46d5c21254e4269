"""What files of the TorchTitan 0.1 and 0.2 convention hold that this version spells differently or can't do yet.

A key is never ignored: it is renamed with a warning, accepted where it means "off", or refused with the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RENAMED = {
    "model.tokenizer_path": "model.hf_assets_path",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "memory_estimation.enabled": "memory_estimation.enable",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
}
"""0.1 spelling to 0.2 spelling."""

RENAMED_SECTIONS = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}


@dataclass(frozen=True)
class NotYet:
    """A key that this version can't act on. `off`: the values that ask for nothing, and so are accepted."""

    what: str
    off: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """A key that only matters while `gate` is on; the convention gives it no effect otherwise, and nor do we."""

    gate: str


_PIPELINE = Tuning("parallelism.pipeline_parallel_degree")
_CONTEXT = Tuning("parallelism.context_parallel_degree")
_EXPERT = Tuning("parallelism.expert_parallel_degree")
_AC = Tuning("activation_checkpoint.mode")
_COMPILE = Tuning("compile.enable")
_CONVERTERS = Tuning("model.converters")
_FT = Tuning("fault_tolerance.enable")

UNSUPPORTED: dict[str, NotYet | Tuning] = {
    "job.custom_config_module": NotYet("configuration modules in Python", ("",)),
    "experimental.custom_args_module": NotYet("configuration modules in Python", ("",)),
    "model.converters": NotYet("model converters (float8, MXFP8)", ([],)),
    "model.print_after_conversion": _CONVERTERS,
    "optimizer.early_step_in_backward": NotYet("the optimizer step inside the backward pass", (False,)),
    "parallelism.tensor_parallel_degree": NotYet("tensor parallelism", (1,)),
    "parallelism.disable_loss_parallel": Tuning("parallelism.tensor_parallel_degree"),
    "parallelism.enable_async_tensor_parallel": Tuning("parallelism.tensor_parallel_degree"),
    "parallelism.pipeline_parallel_degree": NotYet("pipeline parallelism", (1,)),
    "parallelism.module_fqns_per_model_part": _PIPELINE,
    "parallelism.pipeline_parallel_first_stage_less_layers": _PIPELINE,
    "parallelism.pipeline_parallel_last_stage_less_layers": _PIPELINE,
    "parallelism.pipeline_parallel_layers_per_stage": _PIPELINE,
    "parallelism.pipeline_parallel_schedule": _PIPELINE,
    "parallelism.pipeline_parallel_schedule_csv": _PIPELINE,
    "parallelism.pipeline_parallel_microbatch_size": _PIPELINE,
    "parallelism.pipeline_parallel_expert_parallel_overlap": _PIPELINE,
    "parallelism.context_parallel_degree": NotYet("context parallelism", (1,)),
    "parallelism.context_parallel_load_balancer": _CONTEXT,
    "parallelism.context_parallel_rotate_method": _CONTEXT,
    "parallelism.expert_parallel_degree": NotYet("expert parallelism (no mixture-of-experts model)", (1,)),
    "parallelism.expert_tensor_parallel_degree": _EXPERT,
    "parallelism.expert_parallel_comm_backend": _EXPERT,
    "checkpoint.enable_ft_dataloader_checkpoints": _FT,
    "checkpoint.initial_load_in_hf_quantized": NotYet("quantized Hugging Face weights", (False,)),
    "checkpoint.create_seed_checkpoint": NotYet(
        "seed checkpoints, nor needed: initial weights are the same under every layout", (False,)
    ),
    "activation_checkpoint.mode": NotYet("activation checkpointing", ("none",)),
    "activation_checkpoint.selective_ac_option": _AC,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": _AC,
    "activation_checkpoint.early_stop": _AC,
    "activation_checkpoint.memory_budget": _AC,
    "activation_checkpoint.visualize_memory_budget_pareto": _AC,
    "activation_checkpoint.preserve_rng_state": _AC,
    "activation_checkpoint.determinism_check": _AC,
    "activation_checkpoint.debug": _AC,
    "compile.enable": NotYet("torch.compile", (False,)),
    "compile.components": _COMPILE,
    "compile.backend": _COMPILE,
    "quantize.linear.float8.enable_fsdp_float8_all_gather": _CONVERTERS,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": _CONVERTERS,
    "quantize.linear.float8.recipe_name": _CONVERTERS,
    "quantize.linear.float8.filter_fqns": _CONVERTERS,
    "quantize.linear.float8.emulate": _CONVERTERS,
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": _CONVERTERS,
    "quantize.linear.mx.recipe_name": _CONVERTERS,
    "quantize.linear.mx.filter_fqns": _CONVERTERS,
    "quantize.grouped_mm.float8.fqns": _CONVERTERS,
    "quantize.grouped_mm.mx.recipe_name": _CONVERTERS,
    "quantize.grouped_mm.mx.fqns": _CONVERTERS,
    "comm.mode": NotYet("communication without a real backend", ("default",)),
    "memory_estimation.enable": NotYet("memory estimation", (False,)),
    "memory_estimation.disable_fake_mode": Tuning("memory_estimation.enable"),
    "fault_tolerance.enable": NotYet("torchft's fault tolerance", (False,)),
    "fault_tolerance.process_group": _FT,
    "fault_tolerance.process_group_timeout_ms": _FT,
    "fault_tolerance.replica_id": _FT,
    "fault_tolerance.group_size": _FT,
    "fault_tolerance.min_replica_size": _FT,
    "fault_tolerance.semi_sync_method": _FT,
    "debug.moe_force_load_balance": NotYet("mixture-of-experts models", (False,)),
}
"""Every key of the 0.2 convention that the schema lacks."""


def renamed(key: str) -> str | None:
    """Today's spelling of a 0.1 key, or None if `key` is none."""
    if key in RENAMED:
        return RENAMED[key]
    section, _, rest = key.partition(".")
    if section in RENAMED_SECTIONS and rest:
        return f"{RENAMED_SECTIONS[section]}.{rest}"
    return None


def refusals(key: str, value: Any) -> Iterator[str]:
    """The problem with setting an unsupported `key` to `value`, if it asks for anything."""
    entry = UNSUPPORTED[key]
    if isinstance(entry, NotYet) and not any(value == off and type(value) is type(off) for off in entry.off):
        accepted = " or ".join(_toml(off) for off in entry.off)
        yield f"not supported yet: {entry.what}; remove the key or set it to {accepted}"


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
