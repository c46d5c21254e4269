"""FSDP2 (Zhao et al., arXiv:2304.11277) for each block and the root: one path for one process, DDP,
FSDP and HSDP.

`fully_shard` applies on a mesh of one rank too, so mixed precision, offload and gradient
accumulation are the same code everywhere.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from torchtitan.config.derive import expert_shard_dim, sums_on_replicas, sums_whole_gradients
from torchtitan.config.sections.schema import Config, Training
from torchtitan.models.moe import Experts
from torchtitan.parallel.mesh import Mesh


def apply_fsdp(
    model: nn.Module,
    mesh: Mesh,
    training: Training,
    reshard: str,
    *,
    pipelined: bool,
) -> None:
    """Shard `model` in place over `mesh.fsdp`, and its experts, if they are on other ranks, over
    `mesh.expert_fsdp`.

    Gradients are summed over ranks, not averaged, because the loss is already divided by the global
    token count. Experts need no other factor: a rank's gradient is the sum over all rows that were
    sent to it.

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
    shard = partial(fully_shard, mp_policy=policy, offload_policy=offload)
    blocks = list(model.layers.values())
    for i, block in enumerate(blocks):
        # The last block's backward comes next and would gather it again.
        free = reshard == "always" or (
            reshard == "default" and i < len(blocks) - 1 and not pipelined
        )
        if mesh.expert_fsdp is not None and (experts := _experts(block)) is not None:
            place = partial(_expert_shard, shards=mesh.expert_fsdp.size(-1))
            shard(
                experts,
                mesh=mesh.expert_fsdp,
                reshard_after_forward=free,
                shard_placement_fn=place,
            )
        shard(block, mesh=mesh.fsdp, reshard_after_forward=free)
        if mesh.expert_fsdp is not None and experts is not None:
            block.set_modules_to_forward_prefetch(
                [experts]
            )  # while attention runs, and tokens are dispatched
    # A chunked loss uses the output weight after the forward.
    free = reshard == "always" and training.loss_chunks == 1
    shard(model, mesh=mesh.fsdp, reshard_after_forward=free)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            ranks = mesh.expert_fsdp if isinstance(module, Experts) else mesh.fsdp
            if (
                ranks is not None and ranks.size() > 1
            ):  # a single rank would divide by 1, in an extra pass
                module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor otherwise needs.
            module.set_force_sum_reduction_for_comms(True)


def _experts(block: nn.Module) -> Experts | None:
    return next((module for module in block.modules() if isinstance(module, Experts)), None)


def _expert_shard(weight: nn.Parameter, shards: int) -> Shard:
    experts = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0]
    whole = not isinstance(weight, DTensor) and any(width % shards for width in weight.shape[1:])
    return Shard(0 if whole else expert_shard_dim(experts, shards))


@dataclass(frozen=True)
class Accumulation:
    """How the gradients of a step's batches add up."""

    whole: bool
    """As whole gradients, reduced after the last batch. Otherwise each batch's are reduced, and the
    shards add up.
    """
    replicas_apart: bool
    """Each replica adds up its own shards; they are all-reduced after the last batch."""

    def expect(self, model: FSDPModule, *, last: bool) -> None:
        """Prepare `model` for a backward, which may be the last of its step."""
        if self.whole:
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        else:
            # Every backward ends as if it were the last: the buffers of its reductions are freed at
            # its end.
            model.set_requires_all_reduce(last or not self.replicas_apart)


def accumulation(config: Config) -> Accumulation:
    """The way that takes least memory on the device, and of those the one that communicates
    least.
    """
    return Accumulation(sums_whole_gradients(config), sums_on_replicas(config))
