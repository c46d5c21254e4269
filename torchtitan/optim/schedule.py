"""The learning rate as a pure function of the step."""

import math
from typing import Any

from torchtitan.config.optim import LRScheduler
from torchtitan.optim.optimizer import AnyOptimizer


def lr_factor(step: int, schedule: LRScheduler) -> float:
    """Fraction of the peak learning rate at `step`, counted from 0: warm-up, stable phase, decay.

    The n warm-up steps have 1/n, 2/n, ..., 1. The decay reaches `min_lr_factor` one step after the last, so every step
    trains. With `t` the decayed fraction: linear `1 - t`, sqrt `1 - sqrt(t)` (Hägele et al., arXiv:2405.18392), cosine
    `(1 + cos(pi t)) / 2`.
    """
    total = schedule.total_steps or 1
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    decay = total - warmup if schedule.decay_ratio is None else round(total * schedule.decay_ratio)
    into = step + 1 - (total - decay)
    if decay <= 0 or into <= 0:
        return 1.0
    t = min(into / (decay + 1), 1.0) if step < total else 1.0
    shape = {"linear": 1 - t, "sqrt": 1 - math.sqrt(t), "cosine": (1 + math.cos(math.pi * t)) / 2}[
        schedule.decay_type or "linear"
    ]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * shape


class LRSchedule:
    """Sets the learning rate of the next step. Its state is the number of steps so far."""

    def __init__(self, optimizer: AnyOptimizer, peak: float, schedule: LRScheduler):
        self.optimizer, self.peak, self.schedule, self.steps = optimizer, peak, schedule, 0

    def apply(self) -> float:
        """Set the optimizer's learning rates for the current step; returns the rate before per-group scales."""
        rate = self.peak * lr_factor(self.steps, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        return rate

    def advance(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
