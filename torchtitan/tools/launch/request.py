"""A request for a new project, and settings with reasons."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.tools.launch.data_choice import DataChoice
from torchtitan.tools.launch.model_choice import ModelChoice
from torchtitan.tools.planner.hardware import Hardware

_LAYOUT_KEYS = ("activation_checkpoint.mode", "training.local_batch_size")


@dataclass(frozen=True)
class Choice:
    """A value of the configuration and its reason."""

    value: Any
    why: str


Choices = dict[str, Choice]
"""Choices by dotted key."""


@dataclass(frozen=True)
class Request:
    """Model, data, hardware and length of a run that the user wants."""

    model: ModelChoice
    data: DataChoice
    hardware: Hardware
    devices: int
    seq_len: int
    folder: Path
    tokens: float | None = None
    hours: float | None = None
    """Training time, if `tokens` is None."""
    flag_settings: Choices = field(default_factory=dict)
    """Choices from configuration flags, which take precedence."""

    def __post_init__(self) -> None:
        if "model.hf_assets_path" not in self.flag_settings and not self.corpus:
            object.__setattr__(self, "model", self.model.with_published_tokenizer())

    @property
    def corpus(self) -> str | None:
        """`DataChoice.corpus`, unless it holds conversations, which training reads as they are."""
        return None if "training.messages_column" in self.flag_settings else self.data.corpus

    @property
    def has_layout(self) -> bool:
        """Whether flags set (some of) the layout; if so, none is searched for."""
        return any(
            key.startswith("parallelism.") or key in _LAYOUT_KEYS for key in self.flag_settings
        )

    def path_inside(self, name: str) -> str:
        """Absolute path of a file in the project's folder, which may not exist yet."""
        return os.path.abspath(self.folder / name)

    @property
    def on_cpu(self) -> bool:
        return self.hardware.device == "cpu"
