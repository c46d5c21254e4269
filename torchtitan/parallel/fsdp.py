"""FSDP2: every block, then the root, on any mesh. One path for one process, DDP, FSDP and HSDP.

`fully_shard` is applied on a mesh of size 1 too, so that mixed precision, offload and gradient accumulation are the
same code everywhere (Zhao et al., arXiv:2304.11277, for the method).
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan.config.schema import Training


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, training: Training, reshard: str, *, pipelined: bool) -> None:
    """Shard `model` in place over `mesh`.

    Gradients are summed over ranks, not averaged: the loss is already divided by the global token count.

    Args:
        reshard: `parallelism.fsdp_reshard_after_forward`.
        pipelined: a pipeline schedule gathers and frees the weights, around all microbatches at once.
    """
    mixed = training.mixed_precision_param != training.dtype
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param) if mixed else None,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Activations have the parameters' type already; the RoPE tables must stay fp32.
        cast_forward_inputs=False,
    )
    offload: OffloadPolicy = OffloadPolicy()
    if training.enable_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    blocks = list(model.layers.values())
    for i, block in enumerate(blocks):
        # The last block is needed again at once, by its own backward.
        free = reshard == "always" or (reshard == "default" and i < len(blocks) - 1 and not pipelined)
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=free)
    # A chunked loss uses the output weight once the forward is over.
    free = reshard == "always" and training.loss_chunks == 1
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=free)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor otherwise needs.
            module.set_force_sum_reduction_for_comms(True)
