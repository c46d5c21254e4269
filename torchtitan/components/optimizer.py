"""Optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchtitan.config import schema


class AnyOptimizer(Protocol):
    """What the trainer uses of a `torch.optim.Optimizer`."""

    @property
    def state(self) -> Any: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class OptimizerInBackward:
    """Updates each parameter as soon as its gradient is complete, and frees the gradient.

    One optimizer per parameter, called by a hook; together they look like one `torch.optim.Optimizer`.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]):
        self._optimizers = {p: make([group | {"params": [p]}]) for group in groups for p in group["params"]}
        self._norms: list[Tensor] = []
        for param in self._optimizers:
            param.register_post_accumulate_grad_hook(self._update)

    def _update(self, param: Tensor) -> None:
        assert param.grad is not None
        self._norms.append(torch.linalg.vector_norm(param.grad, dtype=torch.float64))
        self._optimizers[param].step()
        self._optimizers[param].zero_grad()

    def take_norms(self) -> list[Tensor]:
        """2-norms of the gradients since the last call."""
        norms, self._norms = self._norms, []
        return norms

    @property
    def state(self) -> dict[Tensor, Any]:
        return {param: optimizer.state[param] for param, optimizer in self._optimizers.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]

    def step(self) -> None:
        """Update what still has a gradient: nothing, after a backward."""
        for optimizer in self._optimizers.values():
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none)


def build_optimizer(models: Sequence[nn.Module], optimizer: schema.Optimizer) -> AnyOptimizer:
    """AdamW or Adam over all parameters; vectors (norm weights, biases) get no weight decay."""
    params = [p for model in models for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[optimizer.name]
    make = partial(
        kind,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=optimizer.implementation == "fused",
        foreach=optimizer.implementation == "foreach",
    )
    groups = [group for group in groups if group["params"]]
    return OptimizerInBackward(groups, make) if optimizer.early_step_in_backward else make(groups)


def lr_factor(step: int, schedule: schema.LRScheduler) -> float:
    """Share of the peak learning rate at `step` (counted from 0): warm-up, stable, decay.

    The warm-up gives 1/n, 2/n, ..., 1 in its n steps. The decay ends one step after the last, at `min_lr_factor`, so
    that every step of the run trains. With `t` the decayed share: linear `1 - t`, sqrt `1 - sqrt(t)` (Hägele et al.,
    arXiv:2405.18392), cosine `(1 + cos(pi t)) / 2`.
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
    shape = {"linear": 1 - t, "sqrt": 1 - math.sqrt(t), "cosine": (1 + math.cos(math.pi * t)) / 2}[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * shape


class LRSchedule:
    """Sets the learning rate of the step to come. Its state is the number of steps it has seen."""

    def __init__(self, optimizer: AnyOptimizer, peak: float, schedule: schema.LRScheduler):
        self.optimizer, self.peak, self.schedule, self.steps = optimizer, peak, schedule, 0

    def apply(self) -> float:
        """Write the rate of the current step into the optimizer, and return it."""
        rate = self.peak * lr_factor(self.steps, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def advance(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
