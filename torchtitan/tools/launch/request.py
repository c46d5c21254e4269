"""What somebody wants to train, and the settings that follow from it, each with its reason."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.tools.launch.data_choice import Data
from torchtitan.tools.launch.model_choice import Model
from torchtitan.tools.planner.hardware import Hardware

_OF_LAYOUT = ("activation_checkpoint.mode", "training.local_batch_size")


@dataclass(frozen=True)
class Choice:
    """A value of the configuration, and why it has it."""

    value: Any
    why: str


Choices = dict[str, Choice]
"""Dotted key to its value."""


@dataclass(frozen=True)
class Request:
    """What somebody wants to train, on what, and for how long."""

    model: Model
    data: Data
    hardware: Hardware
    devices: int
    seq_len: int
    folder: Path
    tokens: float | None = None
    hours: float | None = None
    """If `tokens` is not given."""
    given: Choices | None = None
    """Choices that prevail."""

    def __post_init__(self) -> None:
        if "model.hf_assets_path" not in (self.given or {}) and not self.corpus:
            object.__setattr__(self, "model", self.model.with_published_tokenizer())

    @property
    def corpus(self) -> str | None:
        """`Data.corpus`, unless it holds conversations, which training reads as they are."""
        return None if "training.messages_column" in (self.given or {}) else self.data.corpus

    @property
    def states_layout(self) -> bool:
        """Whether a layout is given, at least in parts: then it is not searched for."""
        return any(key.startswith("parallelism.") or key in _OF_LAYOUT for key in self.given or {})

    def inside(self, name: str) -> str:
        """The path of what the project's folder has under this name, or will have."""
        return os.path.abspath(self.folder / name)

    @property
    def on_cpu(self) -> bool:
        return self.hardware.device == "cpu"
