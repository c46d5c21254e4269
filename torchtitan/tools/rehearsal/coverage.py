"""The configuration of a rehearsal, and the parts of a run that it omits. Imports no torch."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from torchtitan.config.derive import axis_degrees, gradient_accumulation_steps, with_settings
from torchtitan.config.sections.schema import Config
from torchtitan.utils.storage import is_url

BATCHES = 3
"""Number of batches that an accumulated step or a validation runs: the first, a middle one and the
last.
"""
MULTIPLE = math.lcm(*range(1, 13), 2**10, 10**4)
"""Divides the step that is rehearsed for callbacks that do something every N steps."""
_LONG = 10**6
"""Seconds; the watch over hangs never acts."""
_MAX_STEP = 2**53


def rehearsal_config(config: Config, world: int, folder: str) -> Config:
    """The configuration of a rehearsal: validation, save and log are due after each step."""
    training = config.training
    degrees = axis_degrees(config.parallelism)
    rows = training.local_batch_size * degrees["dp_replicate"] * degrees["dp_shard"]
    steps = config.validation.steps
    changes = {
        "job.dump_folder": folder,
        "model.converters": [],
        "model.delta_rule": "torch",
        "compile.enable": False,
        "parallelism.fsdp_buffers": "default",
        "training.global_batch_size": rows * min(gradient_accumulation_steps(config), BATCHES),
        "training.steps": last_step(config),
        "training.document_mask": False,
        "training.enable_cpu_offload": False,
        "training.stages": [],
        "metrics.log_freq": 1,
        "metrics.sinks": [],
        "metrics.enable_tensorboard": False,
        "metrics.enable_wandb": False,
        "validation.freq": 1,
        "validation.steps": steps if 0 <= steps < BATCHES else BATCHES,
        "validation.sets": [],  # one set communicates as several do
        "checkpoint.interval": 1,
        "checkpoint.folder": "checkpoint",
        "checkpoint.async_mode": "disabled",
        "checkpoint.last_save_model_only": False,
        "checkpoint.last_save_in_hf": False,
        "checkpoint.initial_load_path": None,
        "checkpoint.initial_load_in_hf": False,
        "guard.weight_hash_freq": min(1, config.guard.weight_hash_freq),
        "profiling.enable_profiling": False,
        "profiling.enable_memory_snapshot": False,
        "comm.init_timeout_seconds": _LONG,
        "comm.train_timeout_seconds": _LONG,
        "eval.enable": False,
        "sampling.prompts": [],
    }
    return with_settings(config, changes)


def last_step(config: Config) -> int:
    """The step after which a rehearsal ends: with callbacks of the user, a multiple of `MULTIPLE`
    and of the numbers in their keys.
    """
    step = 1
    for name in config.training.callbacks:
        for _, value in [("", MULTIPLE), *config.custom.tables.get(name, ())]:
            multiple = math.lcm(step, value) if type(value) is int else 0
            step = multiple if 0 < multiple < _MAX_STEP else step
    return step


class Omission(NamedTuple):
    """A part of a run that no rehearsal runs."""

    key: str
    """The key that enables it."""
    text: str
    applies: Callable[[Config], Any] | None = None
    """Whether a configuration enables it; None: if the key is set."""


OMISSIONS = (
    Omission("compile.enable", "compiled code (blocks run eagerly)"),
    Omission("model.converters", "8-bit products, their gathers and the reduction of their scales"),
    Omission(
        "model.delta_rule",
        "kernels of flash-linear-attention",
        lambda c: c.model.delta_rule == "fla",
    ),
    Omission(
        "parallelism.fsdp_buffers",
        "buffers of FSDP's collectives (they are torch's default)",
        lambda c: c.parallelism.fsdp_buffers != "default",
    ),
    Omission(
        "parallelism.enable_async_tensor_parallel",
        "asynchronous tensor parallelism (it runs as synchronous)",
        lambda c: (
            c.parallelism.enable_async_tensor_parallel and c.parallelism.tensor_parallel_degree > 1
        ),
    ),
    Omission(
        "parallelism.pipeline_parallel_degree",
        "torch's test of the pipeline's connections",
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
    ),
    Omission("training.enable_cpu_offload", "parameters in host memory"),
    Omission("training.document_mask", "masks between documents"),
    Omission(
        "training.callbacks",
        f"callbacks at other steps than the first and a multiple of {MULTIPLE:,} and their keys",
    ),
    Omission("training.stages", "the later stages of the data"),
    Omission(
        "checkpoint.async_mode",
        "saves in the background (they run in the foreground)",
        lambda c: c.checkpoint.enable and c.checkpoint.async_mode != "disabled",
    ),
    Omission(
        "checkpoint.folder",
        "object storage",
        lambda c: c.checkpoint.enable and is_url(c.checkpoint.folder),
    ),
    Omission("checkpoint.initial_load_path", "loading the first weights"),
    Omission("checkpoint.initial_load_in_hf", "reading Hugging Face weights"),
    Omission(
        "checkpoint.last_save_model_only",
        "the last save of weights alone",
        lambda c: c.checkpoint.enable and c.checkpoint.last_save_model_only,
    ),
    Omission("checkpoint.last_save_in_hf", "the export to Hugging Face"),
    Omission(
        "guard.policy",
        "what the guard does after a spike",
        lambda c: c.guard.policy in ("skip", "rewind"),
    ),
    Omission("eval.enable", "lm-eval"),
    Omission("sampling.prompts", "samples"),
)
NEVER = (
    "a requested stop",
    "threads of data and trackers",
    "ranks that fail or are slow",
    "NCCL itself",
)
"""Parts that belong to every run."""


def omissions(config: Config) -> list[str]:
    """The parts of a run of this configuration that its rehearsal omits, in words."""
    return [
        *(f"{x.text}: {x.key}" for x in OMISSIONS if (x.applies or attrgetter(x.key))(config)),
        *NEVER,
    ]
