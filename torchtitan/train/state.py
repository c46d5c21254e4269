"""The parts a run is made of, and what of them a checkpoint holds besides tensors."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.data.loader import StepLoader
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.optim.schedule import LRSchedule
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.compute import Compute


@dataclass
class Parts:
    """What is built once."""

    mesh: Mesh
    device: torch.device
    models: list[FSDPModule]
    """This rank's pipeline stages; the whole model, if there is no pipeline."""
    optimizer: AnyOptimizer
    schedule: LRSchedule
    loader: StepLoader
    compute: Compute
    validation: tuple[StepLoader, Compute] | None


@dataclass
class Progress:
    """How far the run is."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps whose update was left out: a spike, or a loss or gradient that was not finite."""
    data: dict[str, Any] = field(default_factory=dict)
    """This rank's part of the data position."""
    first_loss: float | None = None
    last_loss: float | None = None

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "tokens": self.tokens, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.tokens, self.skipped = state["step"], state["tokens"], state["skipped"]
