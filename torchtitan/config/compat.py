"""What files of the TorchTitan 0.1 and 0.2 convention hold that this version spells differently or can't do yet.

A key is never ignored: it is renamed with a warning, accepted where it means "off", or refused with the reason.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

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
}
"""0.1 spelling to 0.2 spelling."""

MICROBATCHES = "parallelism.pipeline_parallel_microbatches"
"""0.1 counted the microbatches; 0.2 has `parallelism.pipeline_parallel_microbatch_size`."""

RENAMED_SECTIONS = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}


@dataclass(frozen=True)
class NotYet:
    """A key that this version can't act on. `off`: the values that ask for nothing, and so are accepted."""

    what: str
    off: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """A key that only matters while `gate` is on; the convention gives it no effect otherwise, and nor do we.

    A value must still be of the right `kind`: a mistake in a file is one even while nothing comes of it.
    """

    gate: str
    kind: Any


_EXPERT = "parallelism.expert_parallel_degree"
_FT = "fault_tolerance.enable"

UNSUPPORTED: dict[str, NotYet | Tuning] = {
    "job.custom_config_module": NotYet("configuration modules in Python", ("",)),
    "experimental.custom_args_module": NotYet("configuration modules in Python", ("",)),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Tuning(_EXPERT, bool),
    "parallelism.expert_parallel_degree": NotYet("expert parallelism (no mixture-of-experts model)", (1,)),
    "parallelism.expert_tensor_parallel_degree": Tuning(_EXPERT, int),
    "parallelism.expert_parallel_comm_backend": Tuning(_EXPERT, Literal["standard", "deepep"]),
    "checkpoint.enable_ft_dataloader_checkpoints": Tuning(_FT, bool),
    "checkpoint.initial_load_in_hf_quantized": NotYet("quantized Hugging Face weights", (False,)),
    "checkpoint.create_seed_checkpoint": NotYet(
        "seed checkpoints, nor needed: initial weights are the same under every layout", (False,)
    ),
    "quantize.grouped_mm.float8.fqns": Tuning(_EXPERT, list[str] | str),
    "quantize.grouped_mm.mx.recipe_name": Tuning(_EXPERT, Literal["mxfp8"]),
    "quantize.grouped_mm.mx.fqns": Tuning(_EXPERT, list[str] | str),
    "comm.mode": NotYet("communication without a real backend", ("default",)),
    "memory_estimation.enable": NotYet("memory estimation", (False,)),
    "memory_estimation.disable_fake_mode": Tuning("memory_estimation.enable", bool),
    "fault_tolerance.enable": NotYet("torchft's fault tolerance", (False,)),
    "fault_tolerance.process_group": Tuning(_FT, str),
    "fault_tolerance.process_group_timeout_ms": Tuning(_FT, int),
    "fault_tolerance.replica_id": Tuning(_FT, int),
    "fault_tolerance.group_size": Tuning(_FT, int),
    "fault_tolerance.min_replica_size": Tuning(_FT, int),
    "fault_tolerance.semi_sync_method": Tuning(_FT, str | None),
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
        accepted = " or ".join(map(json.dumps, entry.off))
        yield f"not supported yet: {entry.what}; remove the key or set it to {accepted}"
