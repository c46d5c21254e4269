"""FSDP2 (Zhao et al., arXiv:2304.11277) on each block and on the whole model.

One path serves a single process, DDP, FSDP and HSDP: `fully_shard` applies on a mesh of one rank
too, so offload and gradient accumulation are the same code everywhere. Where one rank has nothing
to gather, FSDP manages no weight.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

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
from torchtitan.models.decoder.mtp import MTPModule
from torchtitan.models.moe.moe import Experts
from torchtitan.models.protocols import Model
from torchtitan.parallel.collectives import local
from torchtitan.parallel.mesh import Mesh


def apply_fsdp(model: Model, mesh: Mesh, config: Config, *, tied: bool) -> None:
    """Shard `model` in place over `mesh.fsdp`, and its experts over `mesh.expert_fsdp` if set.

    Gradients are summed over ranks, not averaged, because the loss is already divided by the global
    token count. The same holds for experts: a rank's gradient is the sum over all rows that were
    sent to it.

    Args:
        tied: the output projection and the token embeddings share a weight.
    """
    training = config.training
    is_mixed = training.mixed_precision_param != training.dtype
    reshard = config.parallelism.fsdp_reshard_after_forward
    # A schedule gathers and frees the weights once for all microbatches.
    pipelined = config.parallelism.pipeline_parallel_degree > 1
    converts_weights = any(is_traceable_wrapper_subclass(weight) for weight in model.parameters())
    if manages_no_weight(config, mesh.fsdp.size(), converts_weights=converts_weights):
        fully_shard(model, mesh=mesh.fsdp, ignored_params=set(model.parameters()))
        return
    shard = partial(
        fully_shard,
        mesh=mesh.fsdp,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param) if is_mixed else None,
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            # Activations already have the parameters' type, and the RoPE tables must stay fp32.
            cast_forward_inputs=False,
        ),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            if training.enable_cpu_offload
            else OffloadPolicy()
        ),
    )
    blocks = list(model.layers.values())
    for i, block in enumerate(blocks):
        # The backward begins with the last block, so freeing it would only gather it again.
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
        shard(block, reshard_after_forward=free)
    ignored_params: set[nn.Parameter] = set()
    # A tied weight belongs to the root: it is needed first, and its gradient is complete last.
    if not tied:
        ignored_params = _shard_ends(model, shard, free=reshard != "never" and not pipelined)
    # The loss may need the root's weights after the forward.
    shard(model, reshard_after_forward=False, ignored_params=ignored_params)
    _prefetch(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            ranks = mesh.expert_fsdp if isinstance(module, Experts) else mesh.fsdp
            # Not for a single rank, which would divide by 1 in an extra pass.
            if ranks is not None and ranks.size() > 1:
                module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a divide factor otherwise needs.
            module.set_force_sum_reduction_for_comms(True)
            buffers = config.parallelism.fsdp_buffers
            if buffers == "symmetric_memory":
                module.set_symm_mem_for_comm()
            elif buffers == "two_reductions":
                module.set_reduce_scatter_max_input_buffers(2, recurse=False)


def manages_no_weight(config: Config, ranks: int, *, converts_weights: bool) -> bool:
    """Whether there is nothing to gather, reduce or offload: FSDP would only copy each weight and
    gradient. Without it, `WeightCopies` casts them, and keeps all copies for the step.

    Args:
        ranks: of FSDP, replicas included.
        converts_weights: weights are DTensors, whose layout FSDP combines with its own (also where
            experts have other ranks), or are gathered in Float8.
    """
    t, p = config.training, config.parallelism
    may_keep_copies = (
        p.fsdp_reshard_after_forward != "always"
        and p.pipeline_parallel_degree == 1
        and not config.optimizer.early_step_in_backward  # needs whole gradients block by block
    )
    return (
        ranks == 1
        and not (converts_weights or t.enable_cpu_offload)
        and t.mixed_precision_reduce == t.dtype
        and (may_keep_copies or t.mixed_precision_param == t.dtype)
    )


def _shard_ends(model: Model, shard: Callable[..., Any], *, free: bool) -> set[nn.Parameter]:
    """Make units of the token embeddings, and of the final norm with the output projection.

    In the root's unit they would be gathered before the first block and reduced after the last
    gradient, with no computation to hide either.

    Args:
        free: free the embeddings after their forward.

    Returns:
        Sharded weights that the root's unit must leave out.
    """
    if model.tok_embeddings is not None:
        shard(model.tok_embeddings, reshard_after_forward=free)
        model.tok_embeddings.set_unshard_in_backward(False)  # which doesn't read the weight
        # Without a list, it would gather what ran before it: the last unit of the previous batch.
        model.tok_embeddings.set_modules_to_backward_prefetch([model.tok_embeddings])
    if model.norm is None or model.output is None:
        return set()
    # Only the norm gets FSDP's hooks. The output projection may run after the forward, with a given
    # weight and once for each slice of the loss.
    model.norm.output = model.output
    shard(model.norm, reshard_after_forward=False)
    del model.norm.output
    return set(model.output.parameters())


def _prefetch(model: Model) -> None:
    """Have FSDP gather a block and its experts before the block that runs earlier computes.

    By default, the gather starts when the host reaches a module. With experts on several ranks,
    the host reaches the next block late, since it waits for the number of rows from each rank.
    """

    def units_in(module: nn.Module | None) -> list[Any]:
        return [m for m in module.modules() if isinstance(m, FSDPModule)] if module else []

    blocks = [units_in(block) for block in model.layers.values()]
    # Validation leaves these out. A gathered, unused weight would be used later, stale.
    always = [units for units in blocks if not isinstance(units[0], MTPModule)]
    root: list[Any] = [model]
    ends = [units_in(end) for end in (model.tok_embeddings, model.norm)]
    for block, *experts in blocks:
        block.set_modules_to_forward_prefetch(experts)
    order = [units for units in [root, ends[0], *always, ends[1]] if units]
    for (module, *_), units in pairwise(order):
        module.set_modules_to_forward_prefetch(units)
    for (module, *_), units in pairwise([root, *reversed(blocks)]):
        module.set_modules_to_backward_prefetch(units)


def _expert_placement(weight: nn.Parameter, shards: int) -> Shard:
    """The dimension along which FSDP shards the stacked weights of experts."""
    experts = len(local(weight))
    uneven = any(width % shards for width in weight.shape[1:])
    if uneven and not isinstance(weight, DTensor):
        return Shard(0)
    return Shard(expert_shard_dim(experts, shards))


def expect_backward(model: FSDPModule, config: Config, *, last: bool) -> None:
    """Prepare `model` for its next backward: choose the accumulation of a step's gradients that
    needs the least device memory, and then the least communication.

    Args:
        last: it is the last backward of its step.
    """
    if sums_whole_gradients(config):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    else:
        # Every backward ends like the last, which frees the buffers of its reductions.
        model.set_requires_all_reduce(last or not sums_on_replicas(config))
