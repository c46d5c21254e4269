"""Sums and decisions over ranks, the global gradient norm, and the local shards of DTensors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan.utils.device import LateValues

Groups = tuple[dist.ProcessGroup, ...]
"""Process groups along mesh axes, from outer to inner."""


def all_reduce(
    value: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce `value` over the group in place and return it. Free in a group of one, or None."""
    if group is not None and group.size() > 1:
        dist.all_reduce(value, op=op, group=group)
    return value


class SumOverRanks(torch.autograd.Function):
    """`apply(x, group)`: the sum of all ranks' `x`, of which each rank uses its own copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return funcol.wait_tensor(funcol.all_reduce(gradient, "sum", ctx.group)), None


class AnyRank:
    """A vote: does any rank vote yes? Work before `answer` overlaps with the exchange."""

    def __init__(self, yes: bool, device: torch.device):
        self._yes = yes
        self._votes = None
        if dist.get_world_size() > 1:
            votes = torch.full((1,), yes, device=device)
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True)
            self._votes = LateValues(votes, work)

    def answer(self) -> bool:
        """Wait until the devices of all ranks have reached the vote."""
        return self._yes if self._votes is None else bool(self._votes.numbers[0])


def gather_values(values: Sequence[float], device: torch.device) -> list[list[float]]:
    """All-gather a few numbers of every rank. Returns a list per rank."""
    local_values = torch.tensor(values, dtype=torch.float64, device=device)
    by_rank = [torch.empty_like(local_values) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, local_values)
    return torch.stack(by_rank).tolist()


# ---- DTensors and their local shards


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter of `module`, on the meta device or the same on all ranks, a DTensor."""
    weight = distribute_tensor(getattr(module, name), mesh, [placement], src_data_rank=None)
    setattr(module, name, nn.Parameter(weight))


def unsharded(value: Tensor) -> Tensor:
    """The full value of a DTensor; a plain tensor itself."""
    if not isinstance(value, DTensor):
        return value
    if value.device.type != value.device_mesh.device_type:  # offloaded
        value = value.to(value.device_mesh.device_type)
    return value.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, outside of autograd; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> Tensor:
    """`local`, without torchao's wrapper: a plain tensor of the same memory."""
    shard = local(tensor)
    while is_traceable_wrapper_subclass(shard):
        inner_names, _ = shard.__tensor_flatten__()
        shard = getattr(shard, inner_names[0])
    return shard


def sharded_like(shard: Tensor, tensor: Tensor) -> Tensor:
    """This rank's `shard` of a tensor laid out like `tensor`, as a DTensor if that is one."""
    return layout_of(tensor)(shard)


def layout_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that turns shards into tensors like `tensor`, without keeping its memory."""
    if not isinstance(tensor, DTensor):
        return lambda shard: shard
    return partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


# ---- the norm of all gradients


class SquaredNorm:
    """The 2-norm of all gradients of the model, from this rank's shards.

    No operation runs on a DTensor. Sums are in fp64: on the CPU an fp32 sum of millions of squares
    is off by 1e-5, differently for each sharding.
    """

    def __init__(self) -> None:
        self._norms: dict[Groups, list[Tensor]] = {}
        """Norms of this rank's shards, by the groups whose ranks hold the other shards."""

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Record the norms of gradients, which may then change."""
        by_layout: dict[Any, list[Tensor]] = {}
        for gradient in gradients:
            is_sharded = isinstance(gradient, DTensor)
            layout = (gradient.device_mesh, gradient.placements) if is_sharded else ()
            by_layout.setdefault(layout, []).append(local(gradient))
        for layout, shards in by_layout.items():
            norms = self._norms.setdefault(_shard_groups(*layout), [])
            norms += torch._foreach_norm(shards, 2.0, dtype=torch.float64)

    def take(self, pp_group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
        """The norm over all ranks and pipeline stages, a scalar on `device`; restarts from zero.

        Replicated gradients count once. There is one reduction per mesh axis that shards any.
        """
        squares = {}
        for groups, norms in self._norms.items():
            square = torch.linalg.vector_norm(torch.stack(norms)) ** 2
            squares[groups] = square.to(device)
        self._norms = {}
        # From the innermost axis outward: a sum over one axis is still sharded over the outer ones.
        while groups := max(squares, key=len, default=()):
            *outer, innermost = groups
            square = all_reduce(squares.pop(groups), innermost)
            outer_square = squares.get(tuple(outer))
            squares[tuple(outer)] = square if outer_square is None else outer_square + square
        total = squares.get(())
        if total is None:
            total = torch.zeros((), dtype=torch.float64, device=device)
        return all_reduce(total, pp_group).sqrt()


def _shard_groups(mesh: DeviceMesh | None = None, placements: Sequence[Placement] = ()) -> Groups:
    """The process groups whose ranks hold different shards of a tensor with this layout."""
    if mesh is None:
        return ()
    assert not any(p.is_partial() for p in placements), "a gradient isn't reduced yet"
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients of one type and device in place by a scalar."""
    if gradients:  # a pipeline stage may have none
        shards = [local(gradient) for gradient in gradients]
        torch._foreach_mul_(shards, factor.to(shards[0]))
