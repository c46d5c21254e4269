"""Numbers of the whole run: sums over ranks and the global gradient norm."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def all_reduce(value: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """`value` combined over the group, in place; free in a group of one."""
    if group.size() > 1:
        dist.all_reduce(value, op=op, group=group)
    return value


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm` (0: only measure).

    Returns:
        The norm before scaling, over the whole model: a plain scalar tensor, fp64.
    """
    params = [p for p in parameters if p.grad is not None]
    # In fp64: an fp32 sum of millions of squares is off by 1e-5 on the CPU, differently for each way of sharding.
    norms = torch._foreach_norm([p.grad for p in params], 2.0, dtype=torch.float64)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
