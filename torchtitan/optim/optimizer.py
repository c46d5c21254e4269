"""Optimizers and parameter groups."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from torchtitan.config.registry import Custom, optimizers
from torchtitan.config.sections.optim import Optimizer
from torchtitan.optim.muon import StackedMuon
from torchtitan.optim.registered import make_registered
from torchtitan.parallel.collectives import SquaredNorm, local
from torchtitan.utils.torch_compat import keep_muon_updates_sharded


class AnyOptimizer(Protocol):
    """The part of `torch.optim.Optimizer` that training uses."""

    @property
    def state(self) -> Any: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class _Joined:
    """Several optimizers behind the interface of one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def state(self) -> dict[Tensor, Any]:
        return {
            param: optimizer.state[param]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class OptimizerInBackward(_Joined):
    """Updates each parameter as soon as its gradient is complete, then frees the gradient.

    Every parameter has its own optimizer, called by a hook, so `step` after the backward finds no
    gradients.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ):
        self._of = {p: make([group | {"params": [p]}]) for group in groups for p in group["params"]}
        super().__init__(list(self._of.values()))
        self.norm = SquaredNorm()
        """Of the gradients since it was last taken."""
        for param in self._of:
            param.register_post_accumulate_grad_hook(self._update)

    def _update(self, param: Tensor) -> None:
        assert param.grad is not None
        self.norm.add([param.grad])
        self._of[param].step()
        self._of[param].zero_grad()


def _adam_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch's `adam` for a parameter group."""
    beta1, beta2 = group["betas"]
    same = {name: group[name] for name in ("foreach", "fused", "lr", "weight_decay", "eps")}
    return same | {
        "beta1": beta1,
        "beta2": beta2,
        "amsgrad": False,
        "maximize": False,
    }


class ShardedAdam(torch.optim.Adam):
    """Adam and AdamW on this rank's shards. On hundreds of DTensors torch's dispatch takes
    milliseconds a step.
    """

    @property
    def clips(self) -> bool:
        """`step` accepts `divisor` and `skip`."""
        return all(group["fused"] for group in self.param_groups)

    @torch.no_grad()
    def step(
        self, closure: None = None, *, divisor: Tensor | None = None, skip: Tensor | None = None
    ) -> None:
        """
        Args:
            divisor: of all gradients, a scalar on their device; they are divided in place. Needs
            `clips`.
            skip: a scalar on their device; if true, change nothing. Needs `clips`.
        """
        divisor = None if divisor is None else divisor.float()
        skip = None if skip is None else skip.float()
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            shards = [[local(tensor) for tensor in tensors] for tensors in lists]
            params, gradients, means, squares, largest, steps = shards
            adam(
                params,
                gradients,
                means,
                squares,
                largest,
                steps,
                grad_scale=divisor,
                found_inf=skip,
                decoupled_weight_decay=group["decoupled_weight_decay"],
                **_adam_settings(group),
            )


class NarrowAdam(torch.optim.Optimizer):
    """Adam or AdamW with both moments stored in bf16. Computes in the parameter's dtype, one
    parameter at a time.
    """

    def __init__(self, groups: list[dict[str, Any]], *, decoupled: bool, **settings: Any):
        super().__init__(groups, settings)
        self._decoupled = decoupled

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=param.device if group["fused"] else "cpu"
            )
            for slot in ("exp_avg", "exp_avg_sq"):
                state[slot] = torch.zeros_like(param, dtype=torch.bfloat16)
        wide = {slot: local(state[slot]).to(param.dtype) for slot in ("exp_avg", "exp_avg_sq")}
        adam(
            [local(param)],
            [local(param.grad)],
            [wide["exp_avg"]],
            [wide["exp_avg_sq"]],
            [],
            [state["step"]],
            decoupled_weight_decay=self._decoupled,
            **_adam_settings(group),
        )
        for slot, value in wide.items():
            local(state[slot]).copy_(value)


def build_optimizer(
    models: Sequence[nn.Module], optimizer: Optimizer, custom: Custom | None = None
) -> AnyOptimizer:
    """Build the optimizer of all parameters.

    Vectors (norm weights, biases) get no weight decay. Muon (Jordan et al., 2024,
    kellerjordan.github.io/posts/muon) updates the matrices of the blocks, each expert's on its own;
    AdamW updates embedding, output and vectors.
    """
    named = [
        (name, p) for model in models for name, p in model.named_parameters() if p.requires_grad
    ]
    groups: dict[tuple[int, float, float], dict[str, Any]] = {}
    for name, param in named:
        decay = optimizer.weight_decay if param.dim() > 1 else 0.0
        scale = 1.0
        if rule := next(
            (rule for rule in optimizer.param_groups if fnmatchcase(name, rule.pattern)), None
        ):
            decay = decay if rule.weight_decay is None else rule.weight_decay
            scale = rule.lr_scale
        muon = (
            param.dim()
            if optimizer.name == "Muon" and param.dim() > 1 and name.startswith("layers.")
            else 0
        )
        group: dict[str, Any] = {
            "params": [],
            "weight_decay": decay,
            "lr_scale": scale,
            "muon": muon,
        }
        groups.setdefault((muon, decay, scale), group)["params"].append(param)
    make = partial(_make, optimizer)
    if registered := optimizers.chosen(optimizer.name, custom or Custom()):
        make = partial(
            make_registered, optimizer, registered, {param: name for name, param in named}
        )
    if optimizer.early_step_in_backward:
        return OptimizerInBackward(list(groups.values()), make)
    kinds = [[group for group in groups.values() if group["muon"] == muon] for muon in (0, 2, 3)]
    made = [make(kind) for kind in kinds if kind]
    return made[0] if len(made) == 1 else _Joined(made)


def _make(optimizer: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """One optimizer, for groups that all have the same "muon": the dimensions of what it updates, 0
    for AdamW.
    """
    if groups[0]["muon"] == 3:
        momentum = optimizer.muon_momentum
        steps = optimizer.muon_ns_steps
        return StackedMuon(
            groups,
            lr=optimizer.lr,
            momentum=momentum,
            ns_steps=steps,
        )
    if groups[0]["muon"]:
        keep_muon_updates_sharded()
        return torch.optim.Muon(
            groups,
            lr=optimizer.lr,
            momentum=optimizer.muon_momentum,
            ns_steps=optimizer.muon_ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
    decoupled = optimizer.name != "Adam"
    settings = {
        "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "fused": optimizer.implementation == "fused",
        "foreach": optimizer.implementation == "foreach",
    }
    if optimizer.state_dtype == "bfloat16":
        return NarrowAdam(groups, decoupled=decoupled, **settings)
    return ShardedAdam(groups, decoupled_weight_decay=decoupled, **settings)
