"""Optimizers that a module of the user registers, and what training and checkpoints need from them.

`make(groups, optimizer[, keys])` returns a `torch.optim.Optimizer`:

- `groups` are parameter groups: `params`, `lr`, `weight_decay` and `lr_scale`, which must stay in
  `param_groups`. The schedule sets each group's `lr` before every step. `optimizer` is the section
  `[optimizer]`.
- Parameters and gradients are DTensors, sharded alike; plain tensors on one rank in fp32.
  Element-wise code may work on the shards alone: `torchtitan.parallel.collectives.local(tensor)` is
  this rank's shard, which may be empty.
- Gradients are the global batch's, already clipped. `param.grad` may be None. A step with
  `lr` 0 must leave the weights unchanged: a resume takes one, with zero gradients, to create the
  state that it loads.
- State is tensors in `self.state[param]`: of the parameter's size and sharded like it, as
  `torch.zeros_like(param)` is, or scalars that are the same on all ranks. It is then saved and
  resumes under any layout. Everything else must follow from the configuration.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config.sections.optim import Optimizer
from torchtitan.utils.errors import UserError


def make_registered(
    optimizer: Optimizer,
    make: Callable[..., Any],
    names: Mapping[Tensor, str],
    groups: list[dict[str, Any]],
) -> torch.optim.Optimizer:
    """Make a registered optimizer, and check it now and after its first step.

    Args:
        names: names of the parameters, for messages.

    Raises:
        UserError: it isn't an optimizer of all parameters.
    """
    plain_groups = [{"lr": optimizer.lr} | group for group in groups]
    for group in plain_groups:
        del group["muon"]
    user_optimizer = make(plain_groups, optimizer)
    key = f'optimizer.name: "{optimizer.name}"'
    if not isinstance(user_optimizer, torch.optim.Optimizer):
        raise UserError(
            f"{key} made a {type(user_optimizer).__name__}; it must make a torch.optim.Optimizer"
        )
    if _ids(user_optimizer.param_groups) != _ids(groups):
        raise UserError(
            f"{key} doesn't hold the parameters of its groups; pass groups to super().__init__"
        )
    if not all("lr_scale" in group for group in user_optimizer.param_groups):
        raise UserError(
            f"{key} dropped lr_scale from its groups, by which the schedule scales lr; "
            "keep the groups"
        )

    is_checked = False

    def check_once(user_optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal is_checked
        if is_checked:  # torch iterates over its hooks now, so none may be removed
            return
        is_checked = True
        for param, state in user_optimizer.state.items():
            for slot, value in state.items():
                problem = _state_problem(value, param)
                if problem:
                    raise UserError(f"{key}: state {slot!r} of {names[param]} {problem}")

    user_optimizer.register_step_post_hook(check_once)
    return user_optimizer


def _ids(groups: Sequence[dict[str, Any]]) -> set[int]:
    return {id(param) for group in groups for param in group["params"]}


def _state_problem(value: Any, param: Tensor) -> str | None:
    """Why a checkpoint can't hold this entry of a parameter's state for all layouts, or None."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, which is not saved; keep it in a tensor"
    if value.dim() == 0:
        return None
    if not isinstance(param, DTensor):
        if value.shape == param.shape:
            return None
        return f"is {list(value.shape)}; make it like the parameter"
    if not isinstance(value, DTensor):
        return (
            "is a plain tensor, of which a checkpoint can't tell the ranks' parts; make it by "
            "torch.zeros_like(param), and work on local(state)"
        )
    if _layout(value) != _layout(param):
        return (
            f"is {list(value.shape)} sharded as {value.placements}, the parameter "
            f"{list(param.shape)} as {param.placements}; make it by torch.zeros_like(param)"
        )
    return None


def _layout(tensor: DTensor) -> tuple[object, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape
