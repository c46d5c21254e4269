"""The parts of a run, and what a checkpoint holds besides their tensors."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.data.loader import StepLoader
from torchtitan.data.positions import DataPosition
from torchtitan.data.text.contents import Lists
from torchtitan.health.guard import Guard
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.parallel.agree import from_all
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.forward import Compute
from torchtitan.train.logits import Probe
from torchtitan.train.validation import Validator


@dataclass
class Parts:
    """What is built once."""

    mesh: Mesh
    device: torch.device
    models: list[FSDPModule]
    """This rank's pipeline stages; the whole model without a pipeline."""
    optimizer: AnyOptimizer
    schedule: LRSchedule
    loader: StepLoader
    compute: Compute
    validation: Validator | None
    experts: ExpertBalance | None = None
    """None for a dense model."""
    average: WeightAverage | None = None
    """Of the weights; None without `ema.enable`."""
    probe: Probe | None = None
    """Of a run that evaluates or writes samples."""


@dataclass
class Progress:
    """How far the run is."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps whose update was skipped: a spike, or a loss or gradient that was not finite."""
    data: DataPosition | None = None
    """This rank's part of the data position; None before the first step of this start."""
    first_loss: float | None = None
    last_loss: float | None = None

    def advance(self, tokens: int, loss: float, *, skipped: bool) -> None:
        """Record a finished step."""
        self.step += 1
        self.tokens += tokens
        self.skipped += skipped
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss

    def state_dict(self) -> dict[str, int]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
        self.tokens = state["tokens"]
        self.skipped = state["skipped"]


@dataclass
class RunState:
    """Everything a checkpoint holds but tensors, independent of the layout."""

    progress: Progress
    schedule: LRSchedule
    loader: StepLoader
    guard: Guard
    average: WeightAverage | None = None

    def gather(self) -> dict[str, Any]:
        """The state, the same on every rank. Called by all ranks."""
        positions = from_all(self.progress.data or self.loader.start)
        state = {
            "progress": self.progress.state_dict(),
            "lr_scheduler": self.schedule.state_dict(),
            "data": self.loader.state(positions),
            "guard": self.guard.spikes.state_dict(),
        }
        return state if self.average is None else state | {"ema": self.average.state_dict()}

    def load(
        self, state: dict[str, Any], exclude: set[str], data_files: Callable[[], Lists]
    ) -> None:
        """Continue from a saved state.

        Args:
            exclude: `checkpoint.exclude_from_loading`.
            data_files: reads the files that the data sources had.
        """
        if "train_state" not in exclude:
            self.progress.load_state_dict(state["progress"])
            self.guard.load(state)
        if "lr_scheduler" not in exclude:
            self.schedule.load_state_dict(state["lr_scheduler"])
        if "dataloader" not in exclude:
            self.loader.seek(state["data"], data_files)
        else:
            self.loader.begin(self.progress.step)
        if self.average is not None and "ema" not in exclude:
            self.average.load_state_dict(state.get("ema"))

    def rewind(self, state: dict[str, Any]) -> None:
        """Return to an earlier step of this run; the data continues where it is."""
        self.progress.load_state_dict(state["progress"])
        self.schedule.load_state_dict(state["lr_scheduler"])
        if self.average is not None:
            self.average.load_state_dict(state.get("ema"))


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed the step after `step`. Randomness is a function of (seed, step, rank), so no generator
    state is saved.
    """
    key = f"{seed}:{step}:{dp_rank}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1)
