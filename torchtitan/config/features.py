"""Questions about a configuration that several rooms ask: what it converts, compiles and splits."""

from collections.abc import Iterable

from torchtitan.config.sections.metrics import Metrics
from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.config.sections.schema import Config

FLOAT8 = ("float8", "quantize.linear.float8")
MX = ("mx", "quantize.linear.mx")
GROUPED_FLOAT8 = ("quantize.grouped_mm.float8",)
GROUPED_MX = ("quantize.grouped_mm.mx",)
"""Names in `model.converters`."""
SMALL_LAYERS = "auto_filter_small_kn"
"""In `quantize.linear.float8.filter_fqns`: skip layers too small to gain."""
_SPLITTING = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Pipeline schedules that split the backward."""


def uses(config: Config, names: tuple[str, ...]) -> bool:
    """Whether `model.converters` holds one of `names`."""
    return not set(names).isdisjoint(config.model.converters)


def names_any(parts: Iterable[str], fqn: str) -> bool:
    """Whether one of `parts` occurs in the module name `fqn`."""
    return any(part in fqn for part in parts)


def compiles_blocks(config: Config) -> bool:
    """Whether each transformer block is a compiled graph."""
    return config.compile.enable and "model" in config.compile.components


def selects_operations(ac: ActivationCheckpoint) -> bool:
    """Whether activation checkpointing chooses what to keep by operation, not by block."""
    return ac.mode == "selective" and ac.selective_ac_option == "op"


def splits_backward(config: Config) -> bool:
    """Whether the pipeline schedule runs the backward of inputs and of weights separately."""
    p = config.parallelism
    if p.pipeline_parallel_degree == 1:
        return False
    return bool(p.pipeline_parallel_schedule_csv) or p.pipeline_parallel_schedule in _SPLITTING


def gains_by_float8(recipe: str | None, inputs: int, outputs: int) -> bool:
    """Whether Float8 is faster for a layer of this size on an H100, by the measurements in
    torchao's float8 README.
    """
    if recipe in (None, "tensorwise"):
        return inputs > 4096 or outputs > 1024
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)


TRACKER_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
"""Built-in tracker, which is also the name of its extra, to the module it imports."""


def chosen_trackers(config: Metrics) -> dict[str, str]:
    """Names of the chosen trackers, each with the key that chooses it."""
    names = {name: "metrics.sinks" for name in config.sinks if name != "jsonl"}
    if config.enable_wandb:
        names["wandb"] = "metrics.enable_wandb"
    if config.enable_tensorboard:
        names["tensorboard"] = "metrics.enable_tensorboard"
    return names
