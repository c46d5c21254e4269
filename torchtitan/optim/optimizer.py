"""Optimizers and parameter groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from torchtitan.config.registry import Custom, optimizers
from torchtitan.config.sections.optim import Optimizer
from torchtitan.models.spec import is_matrix
from torchtitan.optim.muon import Muon
from torchtitan.optim.registered import make_registered
from torchtitan.parallel.collectives import SquaredNorm, local

Group = dict[str, Any]
"""A parameter group of a torch optimizer: `params`, and their settings."""
ADAMW_BYTES = {"fused": 40, "foreach": 70, "for-loop": 70}
"""Bytes moved per parameter of a shard, by `optimizer.implementation`. Fused: AdamW reads
parameter, gradient and two moments and writes all but the gradient (28), the norm reads the
gradient (4), clipping reads and writes it (8). Others: with temporary tensors, an estimate.
"""
CONVERTED_BYTES = 24
"""Bytes moved beside these by moments stored in bf16: both are read and written in fp32, and back.
"""
_UPDATED_ELEMENTS = 2**25
"""Elements whose moments in bf16 are updated at a time, or one parameter's: their copies in fp32
take 256 MiB.
"""
_SETTINGS = (
    "foreach",
    "fused",
    "lr",
    "weight_decay",
    "decoupled_weight_decay",
    "eps",
    "amsgrad",
    "maximize",
)
"""Arguments of torch's `adam` that a parameter group has."""


class AnyOptimizer(Protocol):
    """The part of `torch.optim.Optimizer` that training uses."""

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]: ...

    @property
    def param_groups(self) -> list[Group]: ...

    def step(self) -> object: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class _OptimizerList:
    """Several optimizers behind the interface of one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        state: dict[Tensor, dict[str, Any]] = {}
        for optimizer in self.optimizers:
            # Indexed, not updated: a parameter without state gets an empty one.
            state |= {param: optimizer.state[param] for param in _params(optimizer)}
        return state

    @property
    def param_groups(self) -> list[Group]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class OptimizerInBackward(_OptimizerList):
    """Updates each parameter as soon as its gradient is complete, then frees the gradient.

    Every parameter has its own optimizer, called by a hook, so `step` after the backward finds no
    gradients.
    """

    def __init__(
        self, groups: Sequence[Group], make: Callable[[list[Group]], torch.optim.Optimizer]
    ):
        self._by_param = {}
        for group in groups:
            for param in group["params"]:
                self._by_param[param] = make([group | {"params": [param]}])
                param.register_post_accumulate_grad_hook(self._update)
        super().__init__(list(self._by_param.values()))
        self.norm = SquaredNorm()
        """The gradients' squared norm since its last `take`."""
        self.paused = False
        """Whether gradients are freed without an update."""

    def _update(self, param: Tensor) -> None:
        assert param.grad is not None
        if self.paused:
            param.grad = None
            return
        self.norm.add([param.grad])
        optimizer = self._by_param[param]
        optimizer.step()
        optimizer.zero_grad()


class ShardedAdam(torch.optim.Adam):
    """Adam and AdamW on this rank's shards.

    On hundreds of DTensors torch's dispatch would cost milliseconds a step.
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
            divisor: divides all gradients, in place; a scalar on their device. Needs `clips`.
            skip: if true, change nothing; a scalar on their device. Needs `clips`.
        """
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # parameters, gradients, moments, steps
            beta1, beta2 = group["betas"]
            self._update(
                *([local(tensor) for tensor in tensors] for tensors in lists),
                grad_scale=None if divisor is None else divisor.float(),
                found_inf=None if skip is None else skip.float(),
                beta1=beta1,
                beta2=beta2,
                **{name: group[name] for name in _SETTINGS},
            )

    def _update(self, *lists: list[Tensor], **settings: Any) -> None:
        adam(*lists, **settings)


class NarrowAdam(ShardedAdam):
    """Adam or AdamW with both moments stored in bf16. Computes in the parameter's dtype."""

    def _init_group(self, group: Group, *lists: list[Tensor]) -> bool:
        for param in group["params"]:
            if param.grad is not None and not self.state[param]:
                device = param.device if group["fused"] else "cpu"
                self.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(param, dtype=torch.bfloat16),
                    "exp_avg_sq": torch.zeros_like(param, dtype=torch.bfloat16),
                }
        return super()._init_group(group, *lists)

    def _update(self, *lists: list[Tensor], **settings: Any) -> None:
        while lists[0]:
            sizes = accumulate(param.numel() for param in lists[0])
            count = max(1, sum(size <= _UPDATED_ELEMENTS for size in sizes))
            params, gradients, means, squares, _, steps = (tensors[:count] for tensors in lists)
            narrow = means + squares
            wide = [torch.empty_like(x, dtype=params[0].dtype) for x in narrow]
            torch._foreach_copy_(wide, narrow)
            adam(params, gradients, wide[:count], wide[count:], [], steps, **settings)
            torch._foreach_copy_(narrow, wide)
            lists = tuple(tensors[count:] for tensors in lists)


def build_optimizer(
    models: Sequence[nn.Module],
    optimizer: Optimizer,
    custom: Custom | None = None,
    width_ratio: Callable[[str], float] = lambda name: 1.0,
) -> AnyOptimizer:
    """Build the optimizer of all parameters.

    Vectors (norm weights, biases, filters of channels) get no weight decay. Muon (Jordan et al.,
    2024, kellerjordan.github.io/posts/muon) updates the matrices of the blocks, each expert's
    separately; AdamW updates embedding, output and vectors.

    Args:
        width_ratio: maps a matrix's name to its ratio, like `ModelSpec.width_ratio`.
    """
    groups: dict[tuple[float, ...], Group] = {}
    names = {}
    for model in models:
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            names[param] = name
            settings = _settings(name, param, optimizer, width_ratio(name))
            group = groups.setdefault(tuple(settings.values()), {"params": [], **settings})
            group["params"].append(param)
    make = partial(_make_builtin, optimizer)
    make_custom = optimizers.maker(optimizer.name, custom or Custom())
    if make_custom:
        make = partial(make_registered, optimizer, make_custom, names)
    if optimizer.early_step_in_backward:
        return OptimizerInBackward(list(groups.values()), make)
    instances = []
    for muon in (False, True):
        subset = [group for group in groups.values() if group["muon"] == muon]
        if subset:
            instances.append(make(subset))
    return instances[0] if len(instances) == 1 else _OptimizerList(instances)


def _settings(
    name: str, param: Tensor, optimizer: Optimizer, width_ratio: float
) -> dict[str, float]:
    """The settings that decide a parameter's group.

    `muon`: Muon updates it, not AdamW or a registered optimizer.

    A matrix's update should change its outputs by as much in a wide model as in a narrow one. Adam
    changes every element by about the learning rate, and in directions that the inputs share, so
    outputs change in proportion to the width (muP, Yang et al., arXiv:2203.03466, table 8). Muon's
    updates have a spectral norm in proportion to its root (Liu et al., arXiv:2502.16982, section
    2.2). Decoupled weight decay is multiplied by the learning rate; here it doesn't follow width.
    """
    matrix = is_matrix(name, param.dim())
    by_muon = optimizer.name == "Muon" and matrix and name.startswith("layers.")
    decay = optimizer.weight_decay if matrix else 0.0
    scale = 1.0
    rules = (rule for rule in optimizer.param_groups if fnmatchcase(name, rule.pattern))
    rule = next(rules, None)
    if rule is not None:
        decay = decay if rule.weight_decay is None else rule.weight_decay
        scale = rule.lr_scale
    if matrix and width_ratio != 1:
        width_scale = width_ratio**-0.5 if by_muon else 1 / width_ratio
        scale *= width_scale
        decay = decay if optimizer.name == "Adam" else decay / width_scale
    return {"muon": by_muon, "weight_decay": decay, "lr_scale": scale}


def _make_builtin(optimizer: Optimizer, groups: list[Group]) -> torch.optim.Optimizer:
    """One optimizer, for groups with the same `muon`."""
    if groups[0]["muon"]:
        settings = {"momentum": optimizer.muon_momentum, "ns_steps": optimizer.muon_ns_steps}
        return Muon(groups, {"lr": optimizer.lr, **settings})
    kind = NarrowAdam if optimizer.state_dtype == "bfloat16" else ShardedAdam
    return kind(
        groups,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=optimizer.implementation == "fused",
        foreach=optimizer.implementation == "foreach",
        decoupled_weight_decay=optimizer.name != "Adam",
    )
