"""Which parts of a configuration a rehearsal runs, and which it doesn't. Imports no torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torchtitan.config.derive import axis_degrees, gradient_accumulation_steps
from torchtitan.config.sections.schema import Config

BATCHES = 3
"""Batches that run of an accumulated step, or of a validation: the first, one in the middle, the
last.
"""
_LONG = 10**6
"""Seconds; the watch over hangs never acts."""


def rehearsed(config: Config, world: int, folder: str) -> Config:
    """The configuration of a rehearsal: one step, after which everything that a run does is due."""
    training = config.training
    degrees = axis_degrees(config.parallelism)
    rows = training.local_batch_size * degrees["dp_replicate"] * degrees["dp_shard"]
    changes: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder},
        "model": {"converters": []},
        "compile": {"enable": False},
        "training": {
            "global_batch_size": rows * min(gradient_accumulation_steps(config), BATCHES),
            "steps": 1,
            "document_mask": False,
            "enable_cpu_offload": False,
            "stages": [],
        },
        "metrics": {"log_freq": 1, "sinks": [], "enable_tensorboard": False, "enable_wandb": False},
        "notifications": {"webhook_env": "", "command": []},
        "validation": {
            "freq": 1,
            "steps": _at_most(config.validation.steps),
            "sets": [
                validation_set.model_copy(update={"steps": _at_most(validation_set.steps)})
                for validation_set in config.validation.sets
            ],
        },
        "checkpoint": {
            "interval": 1,
            "folder": "checkpoint",
            "upload_folder": None,
            "async_mode": "disabled",
            "last_save_model_only": False,
            "last_save_in_hf": False,
            "initial_load_path": None,
            "initial_load_in_hf": False,
        },
        "guard": {"weight_hash_freq": min(1, config.guard.weight_hash_freq)},
        "profiling": {"enable_profiling": False, "enable_memory_snapshot": False},
        "comm": {"init_timeout_seconds": _LONG, "train_timeout_seconds": _LONG},
        "eval": {"enable": False},
        "sampling": {"prompts": []},
    }
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=values)
            for name, values in changes.items()
        }
    )


def _at_most(steps: int | None) -> int | None:
    """Batches of a validation that run; -1 would be all."""
    return steps if steps is None or 0 <= steps < BATCHES else BATCHES


class Part(NamedTuple):
    """A part of a run that no rehearsal runs."""

    key: str
    """The key that asks for it."""
    asked: Callable[[Config], Any]
    text: str


PARTS = (
    Part("compile.enable", lambda c: c.compile.enable, "compiled code (blocks run eagerly)"),
    Part(
        "model.converters",
        lambda c: c.model.converters,
        "8-bit products, their gathers and the reduction of their scales",
    ),
    Part(
        "parallelism.enable_async_tensor_parallel",
        lambda c: (
            c.parallelism.enable_async_tensor_parallel and c.parallelism.tensor_parallel_degree > 1
        ),
        "asynchronous tensor parallelism (it runs as synchronous)",
    ),
    Part(
        "parallelism.pipeline_parallel_degree",
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
        "torch's test of the pipeline's connections",
    ),
    Part(
        "training.enable_cpu_offload",
        lambda c: c.training.enable_cpu_offload,
        "parameters in host memory",
    ),
    Part("training.document_mask", lambda c: c.training.document_mask, "masks between documents"),
    Part("training.stages", lambda c: c.training.stages, "the later stages of the data"),
    Part(
        "checkpoint.async_mode",
        lambda c: c.checkpoint.enable and c.checkpoint.async_mode != "disabled",
        "saves in the background (they run in the foreground)",
    ),
    Part(
        "checkpoint.folder",
        lambda c: c.checkpoint.enable and "://" in c.checkpoint.folder,
        "object storage",
    ),
    Part(
        "checkpoint.upload_folder",
        lambda c: c.checkpoint.enable and c.checkpoint.upload_folder,
        "uploads",
    ),
    Part(
        "checkpoint.initial_load_path",
        lambda c: c.checkpoint.initial_load_path,
        "loading the first weights",
    ),
    Part(
        "checkpoint.initial_load_in_hf",
        lambda c: c.checkpoint.initial_load_in_hf,
        "reading Hugging Face weights",
    ),
    Part(
        "checkpoint.last_save_model_only",
        lambda c: c.checkpoint.enable and c.checkpoint.last_save_model_only,
        "the last save of weights alone",
    ),
    Part(
        "checkpoint.last_save_in_hf",
        lambda c: c.checkpoint.enable and c.checkpoint.last_save_in_hf,
        "the export to Hugging Face",
    ),
    Part(
        "guard.policy",
        lambda c: c.guard.policy in ("skip", "rewind"),
        "what the guard does after a spike",
    ),
    Part("eval.enable", lambda c: c.eval.enable, "lm-eval"),
    Part("sampling.prompts", lambda c: c.sampling.prompts, "samples"),
)
NEVER = (
    "a requested stop",
    "threads of data, trackers and notifications",
    "ranks that fail or are slow",
    "NCCL itself",
)
"""Parts that belong to every run."""


def not_rehearsed(config: Config) -> list[str]:
    """The parts of a run of this configuration that its rehearsal leaves out, in words."""
    return [f"{part.text}: {part.key}" for part in PARTS if part.asked(config)] + list(NEVER)
