"""THE ordered list: how a plain model becomes a distributed one. The same for every model family."""

from collections.abc import Mapping

import torch
from torch import nn

from torchtitan.config.schema import Parallelism, Training
from torchtitan.distributed.fsdp import apply_fsdp
from torchtitan.distributed.mesh import Mesh
from torchtitan.distributed.tensor import apply_tensor_parallel
from torchtitan.models.spec import ShardingStyle


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    training: Training,
    parallelism: Parallelism,
    tensor_parallel_plan: Mapping[str, ShardingStyle],
) -> None:
    """Distribute `model` (or a pipeline stage of it) on the meta device in place.

    No memory is taken and nothing is communicated. The pipeline split comes before; context parallelism is the
    attention that the model was built with.
    """
    model.to(getattr(torch, training.dtype))
    if mesh.size("tp") > 1:
        sharded_loss = not parallelism.disable_loss_parallel
        apply_tensor_parallel(model, mesh.tp, tensor_parallel_plan, sharded_loss=sharded_loss)
    pipelined = mesh.size("pp") > 1
    apply_fsdp(model, mesh.fsdp, training, parallelism.fsdp_reshard_after_forward, pipelined=pipelined)
