"""The learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Sequence

from torchtitan.config.registry import Custom, schedules
from torchtitan.config.sections.data import DataStage
from torchtitan.config.sections.optim import LRScheduler
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.utils.errors import UserError

Shape = Callable[[int], float]
"""The curve after warm-up: maps a step, counted from 0, to a factor, where 1 is the peak rate and 0
the floor (`min_lr_factor`). A pure function: a resumed run calls it only for the remaining steps.
"""


def build_shape(schedule: LRScheduler, custom: Custom) -> Shape:
    """The shape that `lr_scheduler.name` names; `make(lr_scheduler[, keys])` if registered."""
    make = schedules.maker(schedule.name, custom)
    if make is None:
        return lambda step: _decay(step, schedule)
    shape = make(schedule)

    def checked_shape(step: int) -> float:
        factor = shape(step)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise UserError(
                f'lr_scheduler.name: "{schedule.name}" gives {factor!r} at step {step} of '
                f"{schedule.total_steps}; it must return a finite number of at least 0"
            )
        return factor

    return checked_shape


def _decay(step: int, schedule: LRScheduler) -> float:
    """Stable phase, then decay.

    With `t` the fraction of the decay's steps before this one, as in TorchTitan 0.2, so every step
    trains: linear `1 - t`, sqrt `1 - sqrt(t)` (Hägele et al., arXiv:2405.18392), cosine `(1 +
    cos(pi t)) / 2`.
    """
    total = schedule.total_steps or 1
    decay = total - schedule.warmup_steps
    if schedule.decay_ratio is not None:
        decay = round(total * schedule.decay_ratio)
    decay_step = step - (total - decay)
    if decay <= 0 or decay_step <= 0:
        return 1.0
    t = min(decay_step / decay, 1.0)
    if schedule.decay_type == "sqrt":
        return 1 - math.sqrt(t)
    if schedule.decay_type == "cosine":
        return (1 + math.cos(math.pi * t)) / 2
    return 1 - t


def lr_factor(step: int, schedule: LRScheduler, shape: Shape | None = None) -> float:
    """Fraction of the peak rate at `step`, counted from 0. Warm-up steps have 1/n, 2/n, ..., 1.

    Args:
        shape: from `build_shape`; None: a built-in one.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    factor = shape(step) if shape else _decay(step, schedule)
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * factor


def stage_scale(stage: int, stages: Sequence[DataStage]) -> float:
    """`lr_scale` in a stage of the data; `stage` is the number of `stages` that have begun."""
    scales = [s.lr_scale for s in stages[:stage] if s.lr_scale is not None]
    return scales[-1] if scales else 1.0


class LRSchedule:
    """Sets the learning rate of the next step. Its state is the number of steps so far."""

    def __init__(
        self,
        optimizer: AnyOptimizer,
        peak: float,
        schedule: LRScheduler,
        custom: Custom | None = None,
        stages: Sequence[DataStage] = (),
    ):
        self.optimizer = optimizer
        self.peak = peak
        self.schedule = schedule
        self.steps = 0
        self.shape = build_shape(schedule, custom or Custom())
        self.stages = stages

    def apply(self, stage: int = 0) -> float:
        """Set the optimizer's rates for the current step; returns the rate before group scales.

        Args:
            stage: the data's stage, which is ahead of the step after a rewind.
        """
        factor = lr_factor(self.steps, self.schedule, self.shape)
        rate = self.peak * factor * stage_scale(stage, self.stages)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        return rate

    def advance(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]
