"""Agreement of all ranks about what they found. Every function is called by all ranks together."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan.utils.errors import CheckpointError, DamageError

Result = TypeVar("Result")


def from_rank_0(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: Any) -> list[Any]:
    """Every rank's `value`, in their order."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], Result]) -> Result:
    """Run `action` on every rank. If it raises a CheckpointError on any, every rank raises the
    first of these.

    One that isn't damage takes precedence, since an earlier checkpoint wouldn't help.
    """
    result = None
    error = None
    try:
        result = action()
    except CheckpointError as own:
        error = own
    raised = sorted(
        (e for e in from_all(error) if e is not None), key=lambda e: isinstance(e, DamageError)
    )
    if raised:
        raise raised[0]
    return result  # type: ignore[return-value]
