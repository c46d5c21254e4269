"""The progress of a run, and the outcome of a step."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchtitan.data.read.positions import DataPosition
from torchtitan.utils.device import LateValues

Approve = Callable[[float | None, float], bool]
"""Decides from a step's loss and gradient norm whether to update the weights."""


def is_finite(loss: float | None, grad_norm: float) -> bool:
    """Whether the weights may be updated: there is a loss, and both values are finite."""
    return loss is not None and math.isfinite(loss) and math.isfinite(grad_norm)


@dataclass(eq=False)
class StepResult:
    """Outcome of a step, over all ranks. Properties wait until the device has computed it."""

    values: LateValues
    """Those of a `DeviceOutcome`, in order."""
    local_tokens: int
    """Number of this rank's tokens with a label."""
    read: int
    """Number of tokens in the batch, with or without a label."""
    stop: bool
    """Whether any rank had been asked to stop when the step began."""
    learning_rate: float = 0.0
    approve: Approve | None = None
    """What `judge` has yet to ask."""
    approved: bool | None = None
    """Its answer; None: the update depended only on whether loss and norm are finite."""

    @property
    def loss(self) -> float | None:
        """Mean over the tokens with a label; None if no token of the global batch has one. Then
        nothing is updated.
        """
        return self.values.numbers[0] if self.tokens else None

    @property
    def grad_norm(self) -> float:
        return self.values.numbers[1]

    @property
    def tokens(self) -> int:
        """Number of tokens with a label."""
        return int(self.values.numbers[2])

    @property
    def local_loss(self) -> float:
        """Mean loss of this rank's tokens; 0 if another rank has the pipeline's last stage."""
        return self.values.numbers[3] * self.tokens / max(self.local_tokens, 1)

    @property
    def mtp_losses(self) -> tuple[float, ...]:
        """Loss of each module of multi-token prediction; empty without a `loss`."""
        return tuple(self.values.numbers[4:]) if self.tokens else ()

    @property
    def updated(self) -> bool:
        """Whether the weights were updated."""
        return is_finite(self.loss, self.grad_norm) if self.approved is None else self.approved

    def judge(self) -> None:
        """Ask `approve`, unless that is done."""
        approve, self.approve = self.approve, None
        if approve is not None:
            self.approved = approve(self.loss, self.grad_norm) and self.loss is not None


@dataclass
class Progress:
    """The progress of a run. Numbers that include the last step's outcome wait for the device."""

    step: int = 0
    data: DataPosition | None = None
    """The position in the data of the lanes that this rank reads; None before the first step of
    this process.
    """
    epochs: Sequence[float] = ()
    """Number of times that this rank has read each data source."""
    validation: Mapping[str, float | None] = field(default_factory=dict)
    """The last loss of each validation set."""
    _tokens: int = 0
    _skipped: int = 0
    _losses: list[float] = field(default_factory=list)
    _unsettled: StepResult | None = None
    _uncounted: StepResult | None = None

    @property
    def tokens(self) -> int:
        self.count()
        return self._tokens

    @property
    def skipped(self) -> int:
        """Steps whose update was skipped: a spike, a loss or gradient that was not finite, or no
        predicted token.
        """
        self.count()
        return self._skipped

    @property
    def losses(self) -> list[float]:
        """The first loss of this process, and up to the last 999 others."""
        self.count()
        return self._losses

    def advance(self, result: StepResult) -> None:
        """Go on after a step, whose outcome may be unknown until the next one is queued."""
        self.settle()
        self.step += 1
        self._unsettled = self._uncounted = result

    def settle(self) -> None:
        """Let the guard judge the last step, and count it. Called by all ranks together.

        Raises:
            NonFiniteError: as by `UpdateGuard.approve`; then the step doesn't count.
        """
        result, self._unsettled = self._unsettled, None
        if result is not None:
            self.step -= 1
            result.judge()
            self.step += 1
        self.count()

    def count(self) -> None:
        """Wait for the outcome of the last step, and add it to the numbers."""
        result, self._uncounted = self._uncounted, None
        if result is None:
            return
        self._tokens += result.tokens
        self._skipped += not result.updated
        if result.loss is not None:
            self._losses = [*self._losses[:1], *self._losses[1:][-998:], result.loss]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "tokens": self.tokens, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
        self._tokens = state["tokens"]
        self._skipped = state["skipped"]


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
