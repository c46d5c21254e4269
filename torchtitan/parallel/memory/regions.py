"""The methods of a block that compilation, activation checkpointing and offload replace."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from torchtitan.models.decoder.model import MoEBlock


def regions(block: nn.Module, *, experts_apart: bool) -> list[tuple[nn.Module, str]]:
    """The methods of a block that are compiled and recomputed separately, as (owner, name).

    Usually that is only `forward`. A block whose experts are sharded separately has a region before
    the exchange of rows, one between the exchanges, one after them, and one for the shared expert,
    which is computed meanwhile.

    Args:
        experts_apart: FSDP gathers experts separately from their block, by hooks in its forward.
    """
    if experts_apart and isinstance(block, MoEBlock):
        shared = [] if block.moe.shared is None else [(block.moe, "shared_output")]
        return [
            (block, "before_experts"),
            (block.moe.experts, "compute"),
            *shared,
            (block, "after_experts"),
        ]
    return [(block, "forward")]


def replace_method(
    owner: nn.Module, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a method of one module by `wrap` of its function.

    With a `wrap` that caches, blocks of one class share a function, and hence a compiled graph.
    """
    function = getattr(owner, name).__func__
    setattr(owner, name, MethodType(wrap(function), owner))
