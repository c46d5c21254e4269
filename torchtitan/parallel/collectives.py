"""Sums and decisions over ranks, and the global gradient norm."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def all_reduce(
    value: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce `value` over the group in place and return it. Free in a group of one, which may also
    be None.
    """
    if group is not None and group.size() > 1:
        dist.all_reduce(value, op=op, group=group)
    return value


class AnyRank:
    """Whether any rank of the world says yes. The exchange overlaps with work between construction
    and `answer`.
    """

    def __init__(self, yes: bool, device: torch.device):
        self._value = torch.full((), float(yes), device=device)
        self._work = None
        if dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, async_op=True)

    def answer(self) -> Tensor:
        """A scalar on the device, above 0 for yes. On CUDA the stream waits for it, not the
        host.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._value


def gather(values: Sequence[float], device: torch.device) -> list[list[float]]:
    """The values of every rank, by rank."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.stack(parts).tolist()


def unsharded(value: Tensor) -> Tensor:
    """The full value of a DTensor; a plain tensor itself."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, outside of autograd; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_of(tensor: Tensor) -> Tensor:
    """`local`, without torchao's wrapper: a plain tensor of the same memory."""
    shard = local(tensor)
    while is_traceable_wrapper_subclass(shard):
        shard = getattr(shard, shard.__tensor_flatten__()[0][0])
    return shard


def sharded_like(shard: Tensor, tensor: Tensor) -> Tensor:
    """This rank's `shard` of a tensor that is sharded like `tensor`, as a DTensor if that is
    one.
    """
    if not isinstance(tensor, DTensor):
        return shard
    layout = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, **layout
    )


class SquaredNorm:
    """The 2-norm of all gradients of the model, from this rank's shards: no operation runs on a
    DTensor.

    In fp64, because an fp32 sum of millions of squares is off by 1e-5 on the CPU, differently for
    each sharding.
    """

    def __init__(self) -> None:
        self._norms: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Take in the norms of gradients, which may then change."""
        shards: dict[Any, list[Tensor]] = {}
        for gradient in gradients:
            layout = (
                (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else ()
            )
            shards.setdefault(layout, []).append(local(gradient))
        for layout, tensors in shards.items():
            norms = self._norms.setdefault(_sharded_over(*layout), [])
            norms.extend(torch._foreach_norm(tensors, 2.0, dtype=torch.float64))

    def take(self, pp_group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
        """The norm over all ranks, pipeline stages included, a plain scalar on `device`; starts
        again from zero.

        Replicated gradients count once. One reduction for each mesh axis over which some are
        sharded.
        """
        norms = self._norms
        self._norms = {}
        squares = {
            groups: torch.linalg.vector_norm(torch.stack(parts)) ** 2
            for groups, parts in norms.items()
        }
        squares = {groups: square.to(device) for groups, square in squares.items()}
        while over := max(squares, key=len, default=()):  # the innermost axis first
            square = all_reduce(squares.pop(over), over[-1])
            squares[over[:-1]] = squares[over[:-1]] + square if over[:-1] in squares else square
        total = squares[()] if squares else torch.zeros((), dtype=torch.float64, device=device)
        return all_reduce(total, pp_group).sqrt()


def _sharded_over(
    mesh: DeviceMesh | None = None, placements: Sequence[Placement] = ()
) -> tuple[dist.ProcessGroup, ...]:
    """The process groups, from outer to inner, whose ranks hold different parts of a tensor of this
    layout.
    """
    assert not any(placement.is_partial() for placement in placements), (
        "a gradient isn't reduced yet"
    )
    split = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(i) for i in split) if mesh is not None else ()


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients of one type and device in place by a scalar."""
    if gradients:  # a pipeline stage may have none
        shards = [local(gradient) for gradient in gradients]
        torch._foreach_mul_(shards, factor.to(shards[0]))
