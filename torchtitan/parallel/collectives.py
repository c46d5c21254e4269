"""Sums and decisions over ranks, and the global gradient norm."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def all_reduce(value: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `value` over the group in place and return it. Free in a group of one."""
    if group.size() > 1:
        dist.all_reduce(value, op=op, group=group)
    return value


class AnyRank:
    """Whether any rank of the world says yes. The exchange overlaps with work between construction and `answer`."""

    def __init__(self, yes: bool, device: torch.device):
        self._value = torch.full((), float(yes), device=device)
        self._work = None
        if dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, async_op=True)

    def answer(self) -> Tensor:
        """A scalar on the device, above 0 for yes. On CUDA the stream waits for it, not the host."""
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


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, pp_group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Scale all gradients in place to a global 2-norm of at most `max_norm`. 0 only measures the norm.

    All parameters must be on one mesh, which FSDP on every module ensures.

    Returns:
        The norm before scaling, over all pipeline stages: a plain fp64 scalar on `device`.
    """
    params = [p for p in parameters if p.grad is not None]
    # In fp64, because an fp32 sum of millions of squares is off by 1e-5 on the CPU, differently for each sharding.
    # One by one, because torch 2.15 takes the type for a dimension in `_foreach_norm` of DTensors.
    norms = [torch.linalg.vector_norm(p.grad, 2.0, dtype=torch.float64) for p in params]
    norm = combined_norm(norms, pp_group, device)
    if max_norm > 0:
        # CUDA's multi-tensor kernel requires the gradients' type.
        nn.utils.clip_grads_with_norm_(params, max_norm, norm.to(params[0].grad.dtype), foreach=True)
    return norm


def combined_norm(norms: Sequence[Tensor], pp_group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The 2-norm of all gradients, given the 2-norms of this rank's parts; reduced over pipeline stages."""
    norm = unsharded(torch.linalg.vector_norm(torch.stack(list(norms)))).to(device)
    return all_reduce(norm**2, pp_group).sqrt()
