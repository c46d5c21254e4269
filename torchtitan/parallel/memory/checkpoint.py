"""Activation checkpointing (Chen et al., arXiv:1604.06174): recompute activations in the backward.

Selection by operation follows Korthikanti et al. (arXiv:2205.05198): save results that are
expensive to compute, and recompute the rest.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.config.converters import names_any
from torchtitan.config.derive import selects_operations
from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.models.protocols import Model
from torchtitan.models.spec import matrices
from torchtitan.parallel.collectives import local
from torchtitan.parallel.memory.regions import regions, replace_method
from torchtitan.utils.torch_compat import replaced

_MATMULS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "torchtitan::grouped_mm")
"""Selection by operation saves every second result of these."""
_ATTENTION = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "flex_attention",
    "torch_attn::_varlen_attn",
    "torchtitan::attention",
    "torchtitan::document_attention",
    "torchtitan::ring_attention",
)
_WITHOUT_RANDOMNESS = frozenset(
    {object, nn.Module, nn.Linear, nn.Embedding, nn.RMSNorm, nn.Identity, nn.ModuleList}
)
"""torch's classes that draw no random numbers, among those that blocks consist of."""
_COMMUNICATION = (
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
)


def apply_activation_checkpoint(
    model: Model, ac: ActivationCheckpoint, *, experts_apart: bool = False
) -> None:
    """Checkpoint the blocks of `model` in place.

    Must come before compilation, so the compiler sees what to recompute. `mode = "memory_budget"`
    leaves the choice to the compiler (see `memory_budget`), so it changes nothing here.

    Args:
        experts_apart: as for `regions`. Operations are then selected within each region; tensors
            between regions are saved, and FSDP's hooks on the experts run outside.
    """
    if ac.mode not in ("full", "selective"):
        return
    by_operation = selects_operations(ac)
    every = int(ac.selective_ac_option) if ac.mode == "selective" and not by_operation else 1
    options: dict[str, Any] = {
        "preserve_rng_state": ac.preserve_rng_state and _may_be_random(model),
        "determinism_check": ac.determinism_check,
        "early_stop": ac.early_stop,
        "debug": ac.debug,
    }
    wrap_block = cache(partial(_with_checkpoint, options=options))
    wrap_region = wrap_block
    if by_operation:
        shapes = _weight_shapes(model, ac.per_op_sac_force_recompute_mm_shapes_by_fqns)
        contexts = partial(_contexts, _ATTENTION + _COMMUNICATION, frozenset(shapes))
        wrap_region = cache(partial(_with_checkpoint, options=options | {"context_fn": contexts}))
    for number, block in enumerate(model.layers.values(), 1):
        if number % every:
            continue
        methods = regions(block, experts_apart=experts_apart)
        if len(methods) > 1 and not by_operation:
            # This wraps the compiled regions, so no operation inside them can be selected.
            replace_method(block, "forward", wrap_block)
            continue
        for owner, name in methods:
            replace_method(owner, name, wrap_region)


def _with_checkpoint(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputing_forward(owner: nn.Module, *inputs: Any) -> Any:
        return checkpoint(forward, owner, *inputs, use_reentrant=False, **options)

    return recomputing_forward


def _may_be_random(model: Model) -> bool:
    """Whether blocks may draw random numbers: this package's classes don't, others' might."""
    return any(
        cls not in _WITHOUT_RANDOMNESS and not cls.__module__.startswith("torchtitan.")
        for block in model.layers.values()
        for kind in {type(module) for module in block.modules()}
        for cls in kind.__mro__
    )


def _weight_shapes(model: Model, names: Collection[str]) -> Iterator[tuple[int, ...]]:
    """Shapes in which products see the weights whose name contains one of `names`: `[in, out]`, of
    experts `[experts, out, in]`.

    A weight sharded by tensor parallelism has two: eager products see the global shape, compiled
    ones the local shape.
    """
    for fqn, weight in matrices(model).items():
        if fqn.startswith("layers.") and names_any(names, fqn):
            for each in (weight, local(weight)):
                yield tuple(each.T.shape if each.dim() == 2 else each.shape)


def _contexts(
    saved_operations: Collection[str], recomputed_shapes: Collection[tuple[int, ...]]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a block's forward and its recomputation, with separate counters.

    Args:
        saved_operations: their results are always saved.
        recomputed_shapes: shapes of the weights whose matrix products are always recomputed. Of
            all products, these included, every second result is saved, so a name changes no other.
    """
    products = {False: 0, True: 0}
    """Matrix products so far, by `context.is_recompute`."""

    def saves(name: str, is_recompute: bool, inputs: tuple[Any, ...]) -> bool:
        if name not in _MATMULS:
            return name in saved_operations
        weight = inputs[-1] if name == "aten::addmm" else inputs[1]
        products[is_recompute] += 1
        return products[is_recompute] % 2 == 1 and tuple(weight.shape) not in recomputed_shapes

    def policy(context: Any, operation: Any, *inputs: Any, **_: Any) -> CheckpointPolicy:
        name = operation.name() if callable(getattr(operation, "name", None)) else str(operation)
        if saves(name.partition(".")[0], context.is_recompute, inputs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def memory_budget(ac: ActivationCheckpoint, folder: str) -> AbstractContextManager[None]:
    """A context in which the compiler chooses what blocks save, if `mode = "memory_budget"`.

    `torch._functorch`'s partitioner gets `ac.memory_budget`, the fraction of the activations that
    may be saved.

    Args:
        folder: receives the plots of `ac.visualize_memory_budget_pareto`.
    """
    from torch._functorch import config

    is_enabled = ac.mode == "memory_budget"
    return replaced(
        config,
        activation_memory_budget=ac.memory_budget if is_enabled else 1.0,
        visualize_memory_budget_pareto=is_enabled and ac.visualize_memory_budget_pareto,
        memory_budget_pareto_dir=folder,
    )
