"""Activation checkpointing: recompute activations in the backward instead of saving them (Chen et
al., arXiv:1604.06174).

Selection by operation follows Korthikanti et al. (arXiv:2205.05198): save results that are
expensive to compute, and recompute the rest.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.parallel.expert import regions
from torchtitan.utils.torch_compat import replaced

_MATMULS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "torchtitan::grouped_mm")
"""Of these, every second result is saved."""
_ATTENTION = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "flex_attention",
    "torch_attn::_varlen_attn",
    "torchtitan::document_attention",
    "torchtitan::ring_attention",
)
_COMMUNICATION = (
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
)


def apply_activation_checkpoint(
    model: nn.Module,
    ac: ActivationCheckpoint,
    *,
    save_attention: bool,
    experts_apart: bool = False,
) -> None:
    """Checkpoint the blocks of `model` in place.

    Must come before compilation, so the compiler sees what to recompute. `mode = "memory_budget"`
    leaves the choice to the compiler (see `memory_budget`), so it changes nothing here.

    Args:
        save_attention: never recompute attention.
        experts_apart: as for `regions`. Selection by operation is then made in each region: what is
        exchanged between
            them is saved, and FSDP's hooks on the experts are not among the operations.
    """
    if ac.mode not in ("full", "selective"):
        return
    options: dict[str, Any] = {
        "preserve_rng_state": ac.preserve_rng_state,
        "determinism_check": ac.determinism_check,
        "early_stop": ac.early_stop,
        "debug": ac.debug,
    }
    every = 1
    by_operation = ac.mode == "selective" and ac.selective_ac_option == "op"
    if by_operation:
        recomputed = {*_weight_shapes(model, ac.per_op_sac_force_recompute_mm_shapes_by_fqns)}
        options["context_fn"] = partial(
            _contexts, (*_ATTENTION, *_COMMUNICATION), frozenset(recomputed)
        )
    elif save_attention:
        options["context_fn"] = partial(_contexts, _ATTENTION, None)
    if ac.mode == "selective" and not by_operation:
        every = int(ac.selective_ac_option)
    # blocks of one class share a function, and hence a compiled graph
    forwards: dict[Any, Any] = {}
    for number, block in enumerate(model.layers.values(), 1):
        if number % every:
            continue
        parts = regions(block, apart=experts_apart)
        own = options
        if len(parts) > 1 and not by_operation:
            # Around the graphs of the parts, so no operation in them can be selected.
            parts = [(block, "forward")]
            own = {key: value for key, value in options.items() if key != "context_fn"}
        for owner, name in parts:
            forward = getattr(owner, name).__func__
            setattr(
                owner,
                name,
                MethodType(forwards.setdefault(forward, _recomputing(forward, own)), owner),
            )


def _recomputing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputing_forward(owner: nn.Module, *inputs: Any) -> Any:
        return checkpoint(forward, owner, *inputs, use_reentrant=False, **options)

    return recomputing_forward


def _weight_shapes(model: nn.Module, names: Collection[str]) -> Iterator[tuple[int, ...]]:
    """Shapes `[in, out]` of the weights of linear layers whose name contains one of `names`.

    A weight sharded by tensor parallelism has two: eager products see the global shape, compiled
    ones the local shape.
    """
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(name in fqn for name in names):
            weight = module.weight
            yield tuple(weight.T.shape)
            yield tuple((weight.to_local() if isinstance(weight, DTensor) else weight).T.shape)


def _contexts(
    saved: Collection[str], recomputed: Collection[tuple[int, ...]] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a block's forward and its recomputation, with separate counters.

    Args:
        saved: operations whose results are always saved.
        recomputed: weight shapes `[in, out]` whose matrix products are always recomputed. Of the
        other products, every
            second result is saved. None: recompute all matrix products.
    """
    matmuls = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name() if callable(getattr(operation, "name", None)) else str(operation)
        name = name.partition(".")[0]
        if recomputed is not None and name in _MATMULS:
            weight = args[-1] if name == "aten::addmm" else args[1]
            if weight.dim() == 2 and tuple(weight.shape) in recomputed:
                return CheckpointPolicy.PREFER_RECOMPUTE
            matmuls[context.is_recompute] += 1
            save = matmuls[context.is_recompute] % 2 == 1
        else:
            save = name in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def memory_budget(ac: ActivationCheckpoint, folder: str) -> AbstractContextManager[None]:
    """Within, the compiler chooses what each block saves, if `mode = "memory_budget"`.

    `torch._functorch`'s partitioner gets `ac.memory_budget`, the fraction of the activations that
    may be saved.

    Args:
        folder: receives the plots of `ac.visualize_memory_budget_pareto`.
    """
    from torch._functorch import config

    enabled = ac.mode == "memory_budget"
    return replaced(
        config,
        activation_memory_budget=ac.memory_budget if enabled else 1.0,
        visualize_memory_budget_pareto=enabled and ac.visualize_memory_budget_pareto,
        memory_budget_pareto_dir=folder,
    )
