"""Agreement of all ranks on what they have found. All ranks call each function together."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from torchtitan.utils.errors import CheckpointError, DamageError

T = TypeVar("T")


def from_rank_0(value: T) -> T:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank of `group`, by default the world, in the order of ranks."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(action: Callable[[], T]) -> T:
    """Run `action` on every rank. If it raises a CheckpointError on any, all ranks raise the first.

    An error that isn't damage takes precedence, since an earlier checkpoint wouldn't help.
    """
    result = None
    error = None
    try:
        result = action()
    except CheckpointError as own:
        error = own
    errors = [other for other in from_all(error) if other is not None]
    if errors:
        raise min(errors, key=lambda other: isinstance(other, DamageError))
    return result  # type: ignore[return-value]
