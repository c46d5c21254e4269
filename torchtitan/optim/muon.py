"""Muon for stacks of matrices, as experts' weights are; `torch.optim.Muon` takes only matrices."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.tensor import DTensor, Shard

from torchtitan.parallel.collectives import local


class OneByOne(torch.optim.Optimizer):
    """An optimizer that updates its parameters one after the other, by `update`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def update(
        self,
        param: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Update a parameter that has a gradient."""
        raise NotImplementedError


class StackedMuon(OneByOne):
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for stacks of matrices.

    Each matrix has its own update, scaled to the size of AdamW's (Liu et al., arXiv:2502.16982);
    the numbers are those of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`. Parameters may be
    sharded over any axes. Where matrices are split, the ranks that hold parts exchange them, so
    that each computes the updates of some whole matrices.
    """

    def update(
        self,
        param: Tensor,
        group: dict[str, Any],
    ) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        lr = group["lr"]
        weight = local(param)
        gradient = local(param.grad)
        mean = local(state["momentum_buffer"])
        mean.lerp_(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(mean, group["momentum"]).bfloat16()
        update = _on_whole(nesterov, _splits(param), group["ns_steps"])
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(update, alpha=-lr * 0.2 * max(param.shape[1:]) ** 0.5)


def orthogonalize(stack: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations in bf16, with the coefficients of Muon's authors.

    Args:
        stack: `[n, rows, columns]`, independent matrices.

    Returns:
        For each, about the closest matrix whose singular values are all 1.
    """
    wide = stack.shape[1] <= stack.shape[2]
    x = stack.bfloat16() if wide else stack.bfloat16().mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x if wide else x.mT


def _splits(param: Tensor) -> list[tuple[dist.ProcessGroup, int]]:
    """The groups over which the matrices of a stack are split, each with the dimension."""
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    splits = []
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and placement.dim != 0 and mesh.size(axis) > 1:
            splits.append((mesh.get_group(axis), placement.dim))
    return splits


def _on_whole(
    part: Tensor,
    splits: Sequence[tuple[dist.ProcessGroup, int]],
    steps: int,
) -> Tensor:
    """This rank's part of `orthogonalize(stack, steps)`, where `part` is its part of the stack.

    Each rank of a group gets the whole of some matrices, about as many as any other.
    """
    if not splits:
        return orthogonalize(part, steps) if len(part) else part
    group, dim = splits[0]
    ranks = group.size()
    matrices = len(part)
    counts = [matrices // ranks + (rank < matrices % ranks) for rank in range(ranks)]
    own = counts[group.rank()]
    received = all_to_all_single(part.contiguous(), [own] * ranks, counts, group)
    whole = torch.cat(received.unflatten(0, (ranks, own)).unbind(), dim)
    whole = _on_whole(whole, splits[1:], steps)
    parts = torch.cat(whole.chunk(ranks, dim)) if own else part[:0]
    return all_to_all_single(parts.contiguous(), counts, [own] * ranks, group)
