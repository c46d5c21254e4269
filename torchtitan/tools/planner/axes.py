"""Axes that a search varies beside the layout. Settings map keys of the configuration to values."""

import itertools
from operator import attrgetter
from typing import Any

from torchtitan.config.derive import replace
from torchtitan.config.sections.schema import Config

Settings = dict[str, Any]

AXES = {
    "batch": "half, double and four times the global batch (changes what is trained)",
    "loss_chunks": "the loss in 1 to 16 chunks",
    "ac": "checkpointing of every 2nd to 4th block, and memory budgets",
    "state_dtype": "the optimizer's state in bf16, too (changes what is trained)",
    "offload": "activations, or parameters and optimizer state, in host memory",
}
"""Axes by name, with what each varies."""

_BATCHES = (0.5, 1, 2, 4)
_LOSS_CHUNKS = (1, 2, 4, 8, 16)
_MODES: tuple[Settings, ...] = (
    {"mode": "full"},
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "none"},
)
_MORE_MODES: tuple[Settings, ...] = (
    *({"mode": "selective", "selective_ac_option": str(k)} for k in (4, 3, 2)),
    *({"mode": "memory_budget", "memory_budget": share} for share in (0.75, 0.5, 0.25)),
)
_CHANGES_TRAINING = ("training.global_batch_size", "optimizer.state_dtype")
_SIMPLEST: Settings = {
    "activation_checkpoint.offload_blocks": 0,
    "training.enable_cpu_offload": False,
}
"""The values of a simple configuration."""
KEYS = (*_CHANGES_TRAINING, *_SIMPLEST, "training.loss_chunks")
"""Everything that the axes set outside of checkpointing's mode."""


def checkpointing_modes(axes: tuple[str, ...]) -> tuple[Settings, ...]:
    """Values of `activation_checkpoint` to try; the first keeps the least."""
    return (*_MODES, *_MORE_MODES) if "ac" in axes else _MODES


def batches(config: Config, axes: tuple[str, ...]) -> list[int]:
    """Global batch sizes to try."""
    rows = config.training.global_batch_size
    scales = _BATCHES if "batch" in axes else (1,)
    return [int(rows * scale) for scale in scales if rows * scale % 1 == 0]


def settings_of(config: Config, axes: tuple[str, ...]) -> list[Settings]:
    """All combinations of the other axes, from the fastest and largest to the leanest."""
    muon = config.optimizer.name == "Muon"
    types = [config.optimizer.state_dtype] if muon else ["float32", "bfloat16"]
    choices: dict[str, list[Settings]] = {
        "loss_chunks": [{"training.loss_chunks": chunks} for chunks in _LOSS_CHUNKS],
        "state_dtype": [{"optimizer.state_dtype": dtype} for dtype in types],
        "offload": [
            {"activation_checkpoint.offload_blocks": n, "training.enable_cpu_offload": cpu}
            for cpu, n in itertools.product((False, True), (0, -1))
        ],
    }
    axis_settings = [settings for axis, settings in choices.items() if axis in axes]
    return [
        {key: value for choice in combination for key, value in choice.items()}
        for combination in itertools.product(*axis_settings)
    ]


def apply_settings(config: Config, settings: Settings) -> Config:
    """`config` with the settings."""
    for key, value in settings.items():
        config = replace(config, key, value)
    return config


def read(config: Config, key: str) -> Any:
    """The value of a section or a dotted key."""
    return attrgetter(key)(config)


def changes(config: Config, original: Config) -> Settings:
    """The keys of axes whose values differ from `original`'s, with these values."""
    return {key: read(config, key) for key in KEYS if read(config, key) != read(original, key)}


def added_complexity(config: Config, original: Config) -> int:
    """Complexity that the axes add: one per kind of offload, two per change of training."""
    keys = changes(config, original)
    offloads = sum(read(config, key) != simple for key, simple in _SIMPLEST.items())
    return offloads + 2 * sum(key in keys for key in _CHANGES_TRAINING)
