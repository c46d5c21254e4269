"""The components of a run, and how far it is."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.data.loader import StepLoader
from torchtitan.data.read.positions import DataPosition
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.optim.qk_clip import QKClip
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.forward import Compute
from torchtitan.train.logits import Probe
from torchtitan.train.validation import Validator


@dataclass
class Components:
    """What is built once; `compute` again where the shape of rows changes."""

    mesh: Mesh
    device: torch.device
    models: list[FSDPModule]
    """This rank's pipeline stages; the whole model without a pipeline."""
    optimizer: AnyOptimizer
    schedule: LRSchedule
    loader: StepLoader
    compute: Compute
    validation: Validator | None = None
    experts: ExpertBalance | None = None
    """None for a dense model."""
    average: WeightAverage | None = None
    """The average of the weights; None without `ema.enable`."""
    probe: Probe | None = None
    """None unless the run evaluates or writes samples."""
    qk_clip: QKClip | None = None
    """None without `optimizer.qk_clip`."""
    stage: int = 0
    """The stage of the data that `compute` is for."""
    compute_of: Callable[[int], Compute] | None = None
    """Builds what computes on the rows of a stage; None: there is only one."""

    def enter(self, stage: int) -> None:
        """Prepare for the rows of this stage of the data, unless that is done."""
        if stage != self.stage and self.compute_of is not None:
            self.compute = self.compute_of(stage)
        self.stage = stage


@dataclass
class Progress:
    """How far the run is."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps whose update was skipped: a spike, or a loss or gradient that was not finite."""
    data: DataPosition | None = None
    """This rank's part of the data position; None before the first step of this start."""
    epochs: Sequence[float] = ()
    """How often this rank has read each data source."""
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
        return {"step": self.step, "tokens": self.tokens, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
        self.tokens = state["tokens"]
        self.skipped = state["skipped"]


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed the step after `step`. Randomness is a function of (seed, step, rank), so no generator
    state is saved.
    """
    key = f"{seed}:{step}:{dp_rank}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1)
