"""THE ordered list: how a plain model becomes a distributed one. The same for every model family."""

from collections.abc import Mapping

import torch
from torch import nn

from torchtitan.config.schema import Config
from torchtitan.config.support import FLOAT8, compiles_blocks, uses
from torchtitan.models.spec import ShardingStyle
from torchtitan.parallel.activation_checkpoint import apply_activation_checkpoint
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.quantize import quantize
from torchtitan.parallel.tensor import apply_tensor_parallel


def parallelize(
    model: nn.Module, mesh: Mesh, config: Config, tensor_parallel_styles: Mapping[str, ShardingStyle]
) -> None:
    """Distribute `model` (or a pipeline stage of it) on the meta device in place.

    No memory is taken and nothing is communicated. The pipeline split comes before; context parallelism is the
    attention that the model was built with.
    """
    training, parallelism = config.training, config.parallelism
    model.to(getattr(torch, training.dtype))
    quantize(model, config, mesh.size("tp"))
    if mesh.size("tp") > 1:
        sharded_loss, float8 = not parallelism.disable_loss_parallel, uses(config, FLOAT8)
        apply_tensor_parallel(model, mesh.tp, tensor_parallel_styles, sharded_loss=sharded_loss, float8=float8)
    compiled = compiles_blocks(config)
    keep_attention = compiled and mesh.size("tp") > 1
    apply_activation_checkpoint(model, config.activation_checkpoint, keep_attention=keep_attention)
    if compiled:
        from torchtitan.parallel.async_tensor import configure_async_tensor_parallel  # half a second: inductor

        asynchronous = parallelism.enable_async_tensor_parallel and mesh.size("tp") > 1
        configure_async_tensor_parallel(mesh.tp, enable=asynchronous)
        apply_compile(model, config.compile)
    pipelined = mesh.size("pp") > 1
    apply_fsdp(model, mesh.fsdp, training, parallelism.fsdp_reshard_after_forward, pipelined=pipelined)
