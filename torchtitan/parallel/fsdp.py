"""FSDP2 (Zhao et al., arXiv:2304.11277) on each block and on the whole model.

One path serves a single process, DDP, FSDP and HSDP: `fully_shard` applies on a mesh of one rank
too, so mixed precision, offload and gradient accumulation are the same code everywhere. Where one
rank asks for none of them, FSDP manages no weight.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan.config.derive import expert_shard_dim, sums_on_replicas, sums_whole_gradients
from torchtitan.config.sections.schema import Config
from torchtitan.config.sections.training import Training
from torchtitan.models.moe.moe import Experts
from torchtitan.models.protocols import Model
from torchtitan.parallel.collectives import local
from torchtitan.parallel.mesh import Mesh


def apply_fsdp(
    model: Model,
    mesh: Mesh,
    training: Training,
    reshard: str,
    *,
    pipelined: bool,
    projects_later: bool = False,
) -> None:
    """Shard `model` in place over `mesh.fsdp`, and its experts over `mesh.expert_fsdp` if set.

    Gradients are summed over ranks, not averaged, because the loss is already divided by the global
    token count. The same holds for experts: a rank's gradient is the sum over all rows that were
    sent to it.

    Args:
        reshard: `parallelism.fsdp_reshard_after_forward`.
        pipelined: the model is a pipeline stage, whose schedule gathers and frees the weights once
            for all microbatches.
        projects_later: the loss uses the output weight after the forward.
    """
    if _stays_whole(model, mesh, training):
        fully_shard(model, mesh=mesh.fsdp, ignored_params=set(model.parameters()))
        return
    shard = partial(
        fully_shard, mp_policy=_mixed_precision(training), offload_policy=_offload(training)
    )
    blocks = list(model.layers.values())
    for i, block in enumerate(blocks):
        # The backward begins with the last block, so freeing that would only gather it again.
        worth_freeing = i < len(blocks) - 1 and not pipelined
        free = reshard == "always" or (reshard == "default" and worth_freeing)
        experts = next((m for m in block.modules() if isinstance(m, Experts)), None)
        if mesh.expert_fsdp is not None and experts is not None:
            placement = partial(_expert_placement, shards=mesh.expert_fsdp.size(-1))
            shard(
                experts,
                mesh=mesh.expert_fsdp,
                reshard_after_forward=free,
                shard_placement_fn=placement,
            )
        shard(block, mesh=mesh.fsdp, reshard_after_forward=free)
        if mesh.expert_fsdp is not None and experts is not None:
            # gathered while attention runs and tokens are dispatched
            block.set_modules_to_forward_prefetch([experts])
    free = reshard == "always" and not projects_later
    shard(model, mesh=mesh.fsdp, reshard_after_forward=free)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            ranks = mesh.expert_fsdp if isinstance(module, Experts) else mesh.fsdp
            # Not for a single rank, which would divide by 1 in an extra pass.
            if ranks is not None and ranks.size() > 1:
                module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor otherwise needs.
            module.set_force_sum_reduction_for_comms(True)


def _stays_whole(model: Model, mesh: Mesh, training: Training) -> bool:
    """Whether there is nothing to gather, cast, reduce or offload: FSDP would only copy each weight
    and gradient, which takes 9 % of a small model's step.
    """
    types = {training.mixed_precision_param, training.mixed_precision_reduce}
    return (
        mesh.fsdp.size() == 1
        and mesh.expert_fsdp is None
        and types == {training.dtype}
        and not training.enable_cpu_offload
        # FSDP combines its layout with that of tensor parallelism, and casts Float8 weights.
        and not any(is_traceable_wrapper_subclass(weight) for weight in model.parameters())
    )


def _mixed_precision(training: Training) -> MixedPrecisionPolicy:
    mixed = training.mixed_precision_param != training.dtype
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param) if mixed else None,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Activations already have the parameters' type, and the RoPE tables must stay fp32.
        cast_forward_inputs=False,
    )


def _offload(training: Training) -> OffloadPolicy:
    if not training.enable_cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def _expert_placement(weight: nn.Parameter, shards: int) -> Shard:
    """The dimension along which FSDP shards the stacked weights of experts."""
    experts = len(local(weight))
    uneven = any(width % shards for width in weight.shape[1:])
    if uneven and not isinstance(weight, DTensor):
        return Shard(0)
    return Shard(expert_shard_dim(experts, shards))


@dataclass(frozen=True)
class Accumulation:
    """The way in which the gradients of a step's batches are accumulated."""

    whole: bool
    """Accumulate whole gradients, and reduce them after the last batch. Otherwise reduce the
    gradients of each batch, and accumulate their shards.
    """
    replicas_apart: bool
    """Accumulate shards per replica, and all-reduce them over replicas after the last batch."""

    def expect(self, model: FSDPModule, *, last: bool) -> None:
        """Prepare `model` for its next backward.

        Args:
            last: it is the last backward of its step.
        """
        if self.whole:
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        else:
            # Every backward ends like the last, which frees the buffers of its reductions.
            model.set_requires_all_reduce(last or not self.replicas_apart)


def accumulation(config: Config) -> Accumulation:
    """The accumulation that needs the least device memory, and then the least communication."""
    return Accumulation(sums_whole_gradients(config), sums_on_replicas(config))
