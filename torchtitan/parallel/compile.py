"""Regional compilation: blocks are compiled one by one, and identical blocks share a graph."""

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch

from torchtitan.config.derive import compiles_blocks, new_shapes
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


def configure_compiler(config: Config, mesh: Mesh, device: torch.device, dim: int) -> None:
    """Set up the compiler for one run of a model of width `dim`, undoing the settings of an earlier
    run in this process. Compilation is lazy, so they stay in effect until the next call.
    """
    _settings.close()
    enter = _settings.enter_context
    dynamo = torch._dynamo.config
    # Beyond dynamo's limit of graphs per function, which is for one shape of rows, a block fails,
    # and FlexAttention computes eagerly. Validation may have another shape, and a run may return
    # to one, so graphs of past stages stay.
    shapes = sum(new_shapes(config)) + config.validation.enable
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        enter(replaced(dynamo, **{name: getattr(dynamo, name) * shapes}))
    if not config.compile.enable:
        return
    torch._dynamo.reset()  # graphs of an earlier run would count against the limit
    if config.optimizer.qk_clip:
        # A recomputed region replaces a buffer, once: its recomputation doesn't.
        enter(replaced(dynamo, skip_fwd_side_effects_in_bwd_under_checkpoint=True))
    enter(keep_buffers_of_backward())
    enter(attention_without_random_numbers())
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        # A norm's backward has two rows of up to eight 16-bit tensors in shared memory.
        if 32 << (dim - 1).bit_length() > getattr(gpu, "shared_memory_per_block_optin", 0):
            enter(
                replaced(
                    torch._inductor.config.triton, mix_order_reduction_allow_multi_stages=False
                )
            )
    folder = os.path.join(config.job.dump_folder, "memory_budget")
    enter(memory_budget(config.activation_checkpoint, folder))
    if mesh.tp is not None:
        forget_equal_meshes()
        enter(no_shared_autograd_cache())
        if config.parallelism.enable_async_tensor_parallel:
            # imports inductor: half a second
            from torchtitan.parallel.tensor.async_tensor import fused_collectives

            enter(fused_collectives(mesh.tp))


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
    compile_once = cache(compiler(config.compile, fullgraph=config.model.delta_rule != "fla"))
    for block in model.layers.values():
        for owner, name in regions(block, experts_apart=experts_apart):
            replace_method(owner, name, compile_once)


def compiled_loss(loss: Callable[..., Any], config: Compile) -> Callable[..., Any]:
    """`loss`, compiled if `config` asks for it."""
    return compiler(config)(loss) if config.enable and "loss" in config.components else loss


def compiler(config: Compile, fullgraph: bool = True) -> Callable[..., Any]:
    """`torch.compile` with the settings of `config`, for one shape."""
    return partial(torch.compile, backend=config.backend, fullgraph=fullgraph, dynamic=False)
