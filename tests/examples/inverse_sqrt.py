"""The learning rate falls with the square root of the step (Vaswani et al., arXiv:1706.03762),
without an end.

torchtitan train CONFIG.toml --experimental.custom_import inverse_sqrt --lr_scheduler.name
inverse_sqrt
"""

import math
from collections.abc import Callable

from torchtitan.config.registry import Section, schedules
from torchtitan.config.sections.optim import LRScheduler
from torchtitan.config.types import Steps


class Keys(Section):
    timescale: Steps | None = None
    """The factor is 1/2 after three times this many steps. Default: the steps of warm-up."""


@schedules.register("inverse_sqrt", Keys)
def inverse_sqrt(lr_scheduler: LRScheduler, keys: Keys) -> Callable[[int], float]:
    warmup = lr_scheduler.warmup_steps
    timescale = keys.timescale or max(warmup, 1)
    return lambda step: math.sqrt(timescale / (step + 1 - warmup + timescale))
