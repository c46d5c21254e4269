"""Muon for stacked matrices: experts' weights `[experts, outputs, inputs]`. `torch.optim.Muon`
takes only matrices.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.tensor import DTensor, Shard

from torchtitan.parallel.collectives import local


class StackedMuon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) with an update of its own for
    each matrix of a stack, scaled to the size of AdamW's (Liu et al., arXiv:2502.16982).

    The numbers are those of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` on each matrix.
    Parameters may be sharded over any axes. Where matrices are split, the ranks that hold parts
    exchange them, so that each computes the updates of some whole matrices.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        ns_steps: int,
    ):
        super().__init__(
            groups,
            {
                "lr": lr,
                "momentum": momentum,
                "ns_steps": ns_steps,
            },
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        weight = local(param)
        gradient = local(param.grad)
        mean = local(state["momentum_buffer"])
        mean.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(mean, group["momentum"]).bfloat16()  # Nesterov's
        update = _on_whole(
            update, _splits(param), lambda stack: orthogonalize(stack, group["ns_steps"])
        )
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * 0.2 * max(param.shape[1:]) ** 0.5)


def orthogonalize(stack: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations in bf16, with the coefficients of Muon's authors.

    Args:
        stack: `[n, rows, columns]`, matrices that have nothing to do with each other.

    Returns:
        Near the closest matrix to each whose singular values are all 1.
    """
    wide = stack.shape[1] <= stack.shape[2]
    x = stack.bfloat16() if wide else stack.bfloat16().mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445
        )
    return x if wide else x.mT


def _splits(param: Tensor) -> list[tuple[dist.ProcessGroup, int]]:
    """The groups over which matrices of the stack are split, and the dimension."""
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    found = []
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and placement.dim != 0 and mesh.size(axis) > 1:
            found.append((mesh.get_group(axis), placement.dim))
    return found


def _on_whole(
    part: Tensor, splits: list[tuple[dist.ProcessGroup, int]], function: Callable[[Tensor], Tensor]
) -> Tensor:
    """This rank's part of `function(stack)`, where `part` is its part of the stack.

    Each rank of a group gets the whole of some matrices, about as many as any other.
    """
    if not splits:
        return function(part) if len(part) else part
    (group, dim), *rest = splits
    ranks = group.size()
    matrices = len(part)
    counts = [matrices // ranks + (rank < matrices % ranks) for rank in range(ranks)]
    own = counts[group.rank()]
    parts = all_to_all_single(part.contiguous(), [own] * ranks, counts, group).unflatten(
        0, (ranks, own)
    )
    whole = _on_whole(torch.cat(parts.unbind(), dim), rest, function)
    parts = torch.cat(whole.chunk(ranks, dim)) if own else part[:0]
    return all_to_all_single(parts.contiguous(), counts, [own] * ranks, group)
