"""FSDP2 (Zhao et al., arXiv:2304.11277) for each block and the root: one path for one process, DDP, FSDP and HSDP.

`fully_shard` applies on a mesh of one rank too, so mixed precision, offload and gradient accumulation are the same code
everywhere.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan.config.schema import Training


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, training: Training, reshard: str, *, pipelined: bool) -> None:
    """Shard `model` in place over `mesh`.

    Gradients are summed over ranks, not averaged, because the loss is already divided by the global token count.

    Args:
        reshard: `parallelism.fsdp_reshard_after_forward`.
        pipelined: a pipeline schedule gathers and frees the weights, once for all microbatches.
    """
    mixed = training.mixed_precision_param != training.dtype
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param) if mixed else None,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Activations already have the parameters' type, and the RoPE tables must stay fp32.
        cast_forward_inputs=False,
    )
    offload: OffloadPolicy = OffloadPolicy()
    if training.enable_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    blocks = list(model.layers.values())
    for i, block in enumerate(blocks):
        # The last block's backward comes next and would gather it again.
        free = reshard == "always" or (reshard == "default" and i < len(blocks) - 1 and not pipelined)
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=free)
    # A chunked loss uses the output weight after the forward.
    free = reshard == "always" and training.loss_chunks == 1
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=free)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if mesh.size() > 1:  # a single rank would divide by 1, in an extra pass
                module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor otherwise needs.
            module.set_force_sum_reduction_for_comms(True)
