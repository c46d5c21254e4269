"""What works together: the table that validation refuses by, and that `tools.matrix` measures cell by cell."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.config.derive import gradient_accumulation_steps
from torchtitan.config.schema import Config


@dataclass(frozen=True)
class Feature:
    """Something that combines with layouts."""

    arguments: tuple[str, ...]
    """What switches it on."""
    axis: str | None = None
    """The mesh axis without which it has no effect."""


FEATURES = {
    "plain": Feature(()),
    "accumulation": Feature(("--training.global_batch_size=16",)),
    "document mask": Feature(("--training.document_mask",)),
    "validation": Feature(("--validation.enable", "--validation.freq=2", "--validation.steps=2")),
    "CPU offload": Feature(("--training.enable_cpu_offload",)),
    "async checkpoint": Feature(("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.async_mode=async")),
    "reshard always": Feature(("--parallelism.fsdp_reshard_after_forward=always",)),
    "optimizer in backward": Feature(("--optimizer.early_step_in_backward", "--training.max_norm=0")),
    "no loss parallel": Feature(("--parallelism.disable_loss_parallel",), "tp"),
    "no load balance": Feature(("--parallelism.context_parallel_load_balancer=none",), "cp"),
    "all-to-all": Feature(("--parallelism.context_parallel_rotate_method=alltoall",), "cp"),
}
"""By their names in the matrix."""


@dataclass(frozen=True)
class Conflict:
    """Two settings that exclude each other."""

    feature: str
    """A name of `FEATURES`."""
    applies: Callable[[Config], bool]
    message: str


CONFLICTS = (
    Conflict(
        "optimizer in backward",
        lambda c: c.optimizer.early_step_in_backward and c.parallelism.pipeline_parallel_degree > 1,
        "optimizer.early_step_in_backward: a pipeline schedule adds up each gradient over its microbatches, so none "
        "is complete before the backward ends; set it to false, or parallelism.pipeline_parallel_degree = 1",
    ),
    Conflict(
        "optimizer in backward",
        lambda c: c.optimizer.early_step_in_backward and c.training.max_norm > 0,
        "optimizer.early_step_in_backward: gradients can't be clipped to training.max_norm, whose global norm is known "
        "only after the backward; set training.max_norm = 0, or early_step_in_backward = false",
    ),
    Conflict(
        "optimizer in backward",
        lambda c: c.optimizer.early_step_in_backward and gradient_accumulation_steps(c) > 1,
        "optimizer.early_step_in_backward: gradients can't be accumulated over microbatches if each uses them up; "
        "set training.local_batch_size so that global_batch_size is reached in one, or early_step_in_backward = false",
    ),
    Conflict(
        "optimizer in backward",
        lambda c: c.optimizer.early_step_in_backward and c.training.on_nonfinite == "skip",
        "optimizer.early_step_in_backward: a bad step is applied before it is known to be bad; set "
        'training.on_nonfinite = "stop", or early_step_in_backward = false',
    ),
    Conflict(
        "reshard always",
        lambda c: c.parallelism.fsdp_reshard_after_forward == "always" and c.parallelism.pipeline_parallel_degree > 1,
        'parallelism.fsdp_reshard_after_forward: "always" would free weights that a pipeline schedule keeps gathered '
        'for all microbatches of a stage; set "default"',
    ),
)
