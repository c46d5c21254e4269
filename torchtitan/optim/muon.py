"""Muon for matrices and stacks of matrices, such as experts' weights, many at a time.

On a sharded matrix `torch.optim.Muon` runs some 30 kernels and 16 collectives, which wait for each
other and move 3 to 15 times its bytes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan.parallel.collectives import local

AT_ONCE = 2**24
"""Elements of the whole matrices that a rank orthogonalizes together, unless one has more.

Larger batches would cost memory and save no time: a product of 4,096 x 4,096 fills a GPU.
"""


class _Split(NamedTuple):
    """A dimension of matrices that is split over ranks."""

    group: dist.ProcessGroup
    dim: int
    """1: rows, 2: columns."""
    size: int
    """Size of the whole dimension, over all ranks of the group."""


_Shards = tuple[Tensor, Tensor, Tensor]
"""This rank's shards of weights, gradients and momentum, `[n, rows, columns]` each."""


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for matrices and their stacks.

    Each matrix has its own update, scaled to the size of AdamW's (Liu et al., arXiv:2502.16982);
    the numbers equal `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`'s. Parameters may be
    sharded over any axes. Where matrices are split, the ranks that hold parts exchange them, so
    that each computes the updates of some whole matrices: as many matrices of one shape as there
    are ranks need one exchange there and one back.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for (shape, splits, device, *_), shards in self._shards_by_layout(group).items():
                ranks = math.prod(split.group.size() for split in splits)
                limit = ranks * max(1, AT_ONCE // math.prod(shape))
                for batch in _batches(shards, limit):
                    _update(batch, shape, splits, group, device=device)

    def _shards_by_layout(self, group: dict[str, Any]) -> dict[Any, list[_Shards]]:
        """Shards by shape of the matrices, their splits, the device to compute on, and types."""
        shards_by_layout: dict[Any, list[_Shards]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
            shards = [local(x) for x in (param, param.grad, state["momentum_buffer"])]
            # Ranks exchange matrices on the mesh's device, where offloaded shards aren't.
            device = param.device_mesh.device_type if isinstance(param, DTensor) else param.device
            weight, gradient, mean = (x if x.dim() == 3 else x[None] for x in shards)
            key = tuple(param.shape[-2:]), _splits(param), device, *(x.dtype for x in shards)
            shards_by_layout.setdefault(key, []).append((weight, gradient, mean))
        return shards_by_layout


def _batches(shards: Sequence[_Shards], limit: int) -> Iterator[list[_Shards]]:
    """Shards of `limit` matrices at a time, fewer at the end."""
    batch: list[_Shards] = []
    room = limit
    for weight, gradient, mean in shards:
        start = 0
        while start < len(weight):
            rows = slice(start, start + room)
            batch.append((weight[rows], gradient[rows], mean[rows]))
            count = len(batch[-1][0])
            start += count
            room -= count
            if not room:
                yield batch
                batch = []
                room = limit
    if batch:
        yield batch


def _update(
    batch: Sequence[_Shards],
    shape: tuple[int, int],
    splits: Sequence[_Split],
    group: dict[str, Any],
    *,
    device: str | torch.device,
) -> None:
    """Update matrices of one shape and layout; the products run on `device`."""
    weights, gradients, means = map(list, zip(*batch, strict=True))
    momentum = group["momentum"]
    torch._foreach_lerp_(means, gradients, 1 - momentum)
    nesterov = torch._foreach_lerp(gradients, means, momentum)
    counts = [len(weight) for weight in weights]
    size = (sum(counts), *weights[0].shape[1:])
    shards = torch.empty(size, dtype=torch.bfloat16, device=device)
    torch._foreach_copy_(shards.split(counts), nesterov)
    del nesterov
    update = _orthogonalize_shards(shards, splits, group["ns_steps"]).to(weights[0])
    lr = group["lr"]
    torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    torch._foreach_add_(weights, update.split(counts), alpha=-lr * 0.2 * max(shape) ** 0.5)


def orthogonalize(stack: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations in bf16, with the coefficients of Muon's authors.

    Args:
        stack: `[n, rows, columns]`, independent matrices.

    Returns:
        For each, about the closest matrix whose singular values are all 1.
    """
    is_wide = stack.shape[1] <= stack.shape[2]
    x = stack.bfloat16() if is_wide else stack.bfloat16().mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x if is_wide else x.mT


def iteration_flops(rows: int, columns: int) -> float:
    """FLOPs of one iteration on a matrix X: A = X X', A A, and a polynomial in A times X (Jordan et
    al. 2024, kellerjordan.github.io/posts/muon).
    """
    short, long = sorted((rows, columns))
    return 4.0 * short * short * long + 2.0 * short**3


def _splits(param: Tensor) -> tuple[_Split, ...]:
    """The splits of a parameter's matrices, in the order in which to join them."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    offset = param.dim() - 3  # matrices are stacks of one
    axes = [
        axis
        for axis, placement in enumerate(param.placements)
        if not placement.is_replicate() and placement.dim > offset and mesh.size(axis) > 1
    ]
    # Axes split a dimension from outer to inner, but FSDP, whose placement is then strided, splits
    # each shard of tensor parallelism.
    axes.sort(key=lambda axis: isinstance(param.placements[axis], _StridedShard))
    sizes = list(param.shape)
    splits = []
    for axis in axes:
        dim = param.placements[axis].dim
        splits.append(_Split(mesh.get_group(axis), dim - offset, sizes[dim]))
        share = -(-sizes[dim] // mesh.size(axis))
        sizes[dim] = min(share, max(0, sizes[dim] - mesh.get_local_rank(axis) * share))
    return tuple(reversed(splits))


def _orthogonalize_shards(shard: Tensor, splits: Sequence[_Split], steps: int) -> Tensor:
    """This rank's shard of `orthogonalize(stack, steps)`, where `shard` is its shard of the stack.

    Each rank of a group gets whole matrices, about as many as any other.
    """
    if not splits:
        return orthogonalize(shard, steps) if len(shard) else shard
    group, dim, size = splits[0]
    ranks = group.size()
    matrices = len(shard)
    counts = [matrices // ranks + (rank < matrices % ranks) for rank in range(ranks)]
    local_count = counts[group.rank()]
    share = -(-size // ranks)
    length = shard.shape[dim]
    pieces = all_to_all_single(_pad(shard, dim, share), [local_count] * ranks, counts, group)
    whole = torch.cat(pieces.unflatten(0, (ranks, local_count)).unbind(), dim).narrow(dim, 0, size)
    whole = _pad(_orthogonalize_shards(whole, splits[1:], steps), dim, share * ranks)
    pieces = torch.cat(whole.chunk(ranks, dim)) if local_count else pieces
    update = all_to_all_single(pieces, counts, [local_count] * ranks, group)
    return update.narrow(dim, 0, length)


def _pad(stack: Tensor, dim: int, size: int) -> Tensor:
    """`stack` with zeros at the end of a dimension, up to `size`; contiguous."""
    padding = size - stack.shape[dim]
    return F.pad(stack, (0, 0) * (2 - dim) + (0, padding)) if padding else stack.contiguous()
