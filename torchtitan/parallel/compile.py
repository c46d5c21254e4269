"""Regional compilation: every transformer block by itself, one graph for all that are alike."""

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from torchtitan.config.schema import Compile

# Its warning about in-place operations in checkpointed blocks is for those who have some.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def configure_compiler(tp_degree: int) -> None:
    """Settings of what is compiled from now on."""
    functorch: Any = functorch_config
    # A pipeline schedule may run a block's backward in two parts, which need the same buffers.
    functorch.donated_buffer = False
    # This cache's keys don't tell ranks apart, whose graphs differ under tensor parallelism (each has the offset of its
    # part of the vocabulary in it): a rank could load another's. Inductor's own cache goes by the finished graph.
    functorch.enable_autograd_cache = tp_degree == 1


def apply_compile(model: nn.Module, config: Compile) -> None:
    """Compile the forward of each block of `model` in place.

    Only the forward, not the call: FSDP's hooks, which gather the weights, run outside of the graph, and those of
    tensor parallelism on the modules inside the block become part of it. A graph break is an error, for it would hide
    how slow the run is.
    """
    compiled: dict[Any, Callable[..., Any]] = {}
    for block in model.layers.values():
        forward = block.forward.__func__
        if forward not in compiled:
            compiled[forward] = torch.compile(forward, backend=config.backend, fullgraph=True, dynamic=False)
        block.forward = MethodType(compiled[forward], block)


def compiled_loss(loss: Callable[..., Any], config: Compile) -> Callable[..., Any]:
    """`loss`, compiled if `config` says so."""
    if not config.enable or "loss" not in config.components:
        return loss
    return torch.compile(loss, backend=config.backend, fullgraph=True, dynamic=False)
