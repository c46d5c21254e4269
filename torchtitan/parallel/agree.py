"""Exchange of small objects, such as problems, so that all ranks agree.

All ranks call each function together. The usual case is a reduced number or a broadcast. Only
`from_all` sends all ranks' objects to all ranks.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from torchtitan.parallel.collectives import all_reduce
from torchtitan.parallel.groups import cpu_group
from torchtitan.utils.errors import CheckpointError, DamageError

T = TypeVar("T")


def from_rank_0(value: T) -> T:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=cpu_group())
    return box[0]


def from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank of `group`, by default the world, in the order of ranks."""
    group = group or cpu_group()
    values = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def problems_from_all(problem: T | None) -> list[T | None]:
    """Every rank's `problem`, or None; an empty list if no rank has one.

    Without problems, it costs one reduced number.
    """
    some = all_reduce(torch.tensor(int(problem is not None)), cpu_group(), dist.ReduceOp.MAX)
    return from_all(problem) if some else []


def together(action: Callable[[], T]) -> T:
    """Run `action` on every rank. If any raises a CheckpointError, all ranks raise the first.

    An error that isn't damage takes precedence, since an earlier checkpoint wouldn't help.
    """
    result = None
    error = None
    try:
        result = action()
    except CheckpointError as raised:
        error = raised
    if errors := [problem for problem in problems_from_all(error) if problem is not None]:
        first = min(errors, key=lambda problem: isinstance(problem, DamageError))
        first.on_all_ranks = True
        raise first
    return result  # type: ignore[return-value]
