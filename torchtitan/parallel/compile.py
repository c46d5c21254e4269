"""Regional compilation: blocks are compiled one by one, and identical blocks share a graph."""

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import Any

import torch

from torchtitan.config.derive import compiles_blocks, stages_of
from torchtitan.config.sections.parallelism import Compile
from torchtitan.config.sections.schema import Config
from torchtitan.models.protocols import Model
from torchtitan.parallel.memory.checkpoint import memory_budget
from torchtitan.parallel.memory.regions import regions, replace_method
from torchtitan.parallel.mesh import Mesh
from torchtitan.utils.torch_compat import (
    attention_without_random_numbers,
    forget_equal_meshes,
    keep_buffers_of_backward,
    no_shared_autograd_cache,
    replaced,
)

_settings = ExitStack()
"""The compiler settings of the latest run in this process."""
atexit.register(_settings.close)  # before the interpreter tears torch down


def configure_compiler(config: Config, mesh: Mesh) -> None:
    """Set up the compiler for one run, undoing the settings of an earlier run in this process.

    Compilation is lazy, so the settings stay in effect until the next call.
    """
    _settings.close()
    _settings.enter_context(_graph_limit(config))
    if not config.compile.enable:
        return
    torch._dynamo.reset()  # graphs of an earlier run would count against the limit
    if config.optimizer.qk_clip:
        # A recomputed region replaces a buffer, once: its recomputation doesn't.
        context = replaced(torch._dynamo.config, skip_fwd_side_effects_in_bwd_under_checkpoint=True)
        _settings.enter_context(context)
    _settings.enter_context(keep_buffers_of_backward())
    _settings.enter_context(attention_without_random_numbers())
    if mesh.tp is not None:
        forget_equal_meshes()
        _settings.enter_context(no_shared_autograd_cache())
    folder = os.path.join(config.job.dump_folder, "memory_budget")
    _settings.enter_context(memory_budget(config.activation_checkpoint, folder))
    if config.parallelism.enable_async_tensor_parallel and mesh.tp is not None:
        # imports inductor: half a second
        from torchtitan.parallel.tensor.async_tensor import fused_collectives

        _settings.enter_context(fused_collectives(mesh.tp))


def _graph_limit(config: Config) -> AbstractContextManager[None]:
    """A context in which dynamo's limit of graphs per function, beyond which a block fails and
    FlexAttention computes eagerly, is for each stage of the data and for validation: each may have
    another shape of rows. A run may return to a shape, so graphs of past stages stay.
    """
    settings = torch._dynamo.config
    shapes = len(stages_of(config)) + config.validation.enable
    limit = settings.recompile_limit * shapes
    total = max(settings.accumulated_recompile_limit, limit)
    return replaced(settings, recompile_limit=limit, accumulated_recompile_limit=total)


def apply_compile(model: Model, config: Config, *, experts_apart: bool = False) -> None:
    """Compile the regions of each block of `model` in place, if `config` asks for it.

    Compiles `forward`, not `__call__`: FSDP's hooks on the block, which gather the weights, run
    outside the graph. Hooks of tensor parallelism on modules inside the block become part of it. A
    graph break is an error, because it would silently cost speed; only flash-linear-attention's
    kernels need one.

    Args:
        experts_apart: as for `regions`.
    """
    if not compiles_blocks(config):
        return
    whole = config.model.delta_rule != "fla"
    compile_once = cache(partial(_compile, config=config.compile, fullgraph=whole))
    for block in model.layers.values():
        for owner, name in regions(block, experts_apart=experts_apart):
            replace_method(owner, name, compile_once)


def compiled_loss(loss: Callable[..., Any], config: Compile) -> Callable[..., Any]:
    """`loss`, compiled if `config` asks for it."""
    if not config.enable or "loss" not in config.components:
        return loss
    return _compile(loss, config)


def _compile(
    function: Callable[..., Any], config: Compile, fullgraph: bool = True
) -> Callable[..., Any]:
    return torch.compile(function, backend=config.backend, fullgraph=fullgraph, dynamic=False)
