"""The progress of a run, and the outcome of a step."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchtitan.data.read.positions import DataPosition


@dataclass(frozen=True)
class BackwardResult:
    """Outcome of a forward and backward, over all ranks."""

    loss: float | None
    """Mean over the tokens with a label; None if no token of the global batch has one. Then nothing
    is updated.
    """
    grad_norm: float
    tokens: int
    """Number of tokens with a label."""
    read: int
    """Number of tokens in the batch, with or without a label."""
    local_loss: float
    """Mean loss of this rank's tokens; 0 if another rank has the pipeline's last stage."""
    mtp_losses: tuple[float, ...]
    """Loss of each module of multi-token prediction; empty without a `loss`."""
    stop: bool
    """Whether any rank had been asked to stop when the step began."""


@dataclass(frozen=True)
class StepResult(BackwardResult):
    """Outcome of a step."""

    learning_rate: float
    updated: bool
    """Whether the weights were updated."""


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
    losses: list[float] = field(default_factory=list)
    """Losses of up to the last 1,000 steps of this process."""
    validation: Mapping[str, float | None] = field(default_factory=dict)
    """The last loss of each validation set."""

    def advance(self, tokens: int, loss: float | None, *, skipped: bool) -> None:
        """Record a finished step; without a loss if it predicted nothing."""
        self.step += 1
        self.tokens += tokens
        self.skipped += skipped
        self.first_loss = loss if self.first_loss is None else self.first_loss
        if loss is not None:
            self.losses = [*self.losses[-999:], loss]

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
