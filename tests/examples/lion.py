"""Lion (Chen et al., arXiv:2302.06675): every weight moves by the learning rate, in the direction
of a running mean.

torchtitan train CONFIG.toml --experimental.custom_import lion --optimizer.name lion --optimizer.lr
1e-4
"""

from typing import Any

import torch

from torchtitan.config.registry import Section, optimizers
from torchtitan.config.sections.optim import Optimizer
from torchtitan.config.types import Decay
from torchtitan.parallel.collectives import local


class Keys(Section):
    beta1: Decay = 0.9
    """Decay of the running mean that gives the direction."""
    beta2: Decay = 0.99
    """Decay of the running mean that is kept."""


@optimizers.register("lion", Keys)
class Lion(torch.optim.Optimizer):
    def __init__(self, groups: list[dict[str, Any]], optimizer: Optimizer, keys: Keys):
        super().__init__(groups, {})
        self.keys = keys

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                weight = local(param)
                gradient = local(param.grad)
                mean = local(state["mean"])
                direction = mean.lerp(gradient, 1 - self.keys.beta1).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    direction, alpha=-group["lr"]
                )
                mean.lerp_(gradient, 1 - self.keys.beta2)
