"""The components of a run, and its progress."""

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
    """The objects that training works with: model, optimizer, data, and what goes with them.

    They are built once, except `compute`, which is rebuilt when a stage of the data changes the
    shape of rows.
    """

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
    """The stage of the data whose rows `compute` expects."""
    build_stage_compute: Callable[[int], Compute] | None = None
    """Builds `compute` for a stage of the data; None: there is only one stage."""

    def enter_stage(self, stage: int) -> None:
        """Prepare for the rows of a stage of the data. Does nothing if it is the current one."""
        if stage != self.stage and self.build_stage_compute is not None:
            self.compute = self.build_stage_compute(stage)
        self.stage = stage


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps whose update was skipped: a spike, a loss or gradient that was not finite, or no
    predicted token.
    """
    data: DataPosition | None = None
    """The position in the data of the lanes that this rank reads; None before the first step of
    this process.
    """
    epochs: Sequence[float] = ()
    """Number of times that this rank has read each data source."""
    first_loss: float | None = None
    last_loss: float | None = None

    def advance(self, tokens: int, loss: float | None, *, skipped: bool) -> None:
        """Record a finished step; without a loss if it predicted nothing."""
        self.step += 1
        self.tokens += tokens
        self.skipped += skipped
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = self.last_loss if loss is None else loss

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "tokens": self.tokens, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
        self.tokens = state["tokens"]
        self.skipped = state["skipped"]


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed the step that follows `step`. Randomness is a function of (seed, step, rank), so
    checkpoints need no generator state.
    """
    key = f"{seed}:{step}:{dp_rank}"
    value = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    # `torch.manual_seed` formats a stack for each kind of device that isn't in use: 1 ms a step.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
