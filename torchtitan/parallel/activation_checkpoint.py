"""Activation checkpointing: what a block's backward recomputes instead of keeping (Chen et al., arXiv:1604.06174).

Selective by operation is Korthikanti et al. (arXiv:2205.05198): results that are dear to compute are kept, the rest is
cheap to make again.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan.config.schema import ActivationCheckpoint

_MATMULS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
"""Every second one is kept, the others are recomputed."""
_ATTENTION = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "flex_attention",
    "torchtitan::ring_attention",
)
_COMMUNICATION = (
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
)


def apply_activation_checkpoint(model: nn.Module, ac: ActivationCheckpoint, *, keep_attention: bool) -> None:
    """Make the blocks of `model` recompute in their backward as `ac` says, in place.

    Comes before compilation, so that what is recomputed is decided inside the compiled graph. `memory_budget` leaves
    that decision to the compiler, and changes nothing here.

    Args:
        keep_attention: never recompute attention. torch 2.13 can't, in a compiled block under tensor parallelism: it
            takes SDPA for a random operation, and mistakes the saved device mesh for the saved generator's state.
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
    if ac.mode == "selective" and ac.selective_ac_option == "op":
        recomputed = {*_weight_shapes(model, ac.per_op_sac_force_recompute_mm_shapes_by_fqns)}
        options["context_fn"] = partial(_contexts, (*_ATTENTION, *_COMMUNICATION), frozenset(recomputed))
    elif keep_attention:
        options["context_fn"] = partial(_contexts, _ATTENTION, None)
    if ac.mode == "selective" and ac.selective_ac_option != "op":
        every = int(ac.selective_ac_option)
    forwards: dict[Any, Any] = {}  # one function for all blocks of a class, so that they share one compiled graph
    for number, block in enumerate(model.layers.values(), 1):
        if number % every == 0:
            forward = type(block).forward
            block.forward = MethodType(forwards.setdefault(forward, _recomputing(forward, options)), block)


def _recomputing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputing_forward(block: nn.Module, *inputs: Any) -> Any:
        return checkpoint(forward, block, *inputs, use_reentrant=False, **options)

    return recomputing_forward


def _weight_shapes(model: nn.Module, names: Collection[str]) -> Iterator[tuple[int, ...]]:
    """Shapes, as a matrix product sees them, of the linear layers whose name contains one of `names`.

    Of a weight split by tensor parallelism the whole's, which eager products see, and the part's, for compiled ones.
    """
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(name in fqn for name in names):
            weight = module.weight
            yield tuple(weight.T.shape)
            yield tuple((weight.to_local() if isinstance(weight, DTensor) else weight).T.shape)


def _contexts(
    kept: Collection[str], recomputed: Collection[tuple[int, ...]] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a block's forward and its recomputation, with counters of their own.

    Args:
        kept: operations whose results are always kept.
        recomputed: shapes of weights whose matrix products are always recomputed; of the others, every second is. None:
            all are.
    """
    matmuls = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name() if callable(getattr(operation, "name", None)) else str(operation)
        name = name.partition(".")[0]
        if recomputed is not None and name in _MATMULS:
            weight = args[-1] if name == "aten::addmm" else args[1]
            if tuple(weight.shape) in recomputed:
                return CheckpointPolicy.PREFER_RECOMPUTE
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        else:
            keep = name in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def use_memory_budget(ac: ActivationCheckpoint, folder: str) -> None:
    """Let the compiler choose what each block keeps: `torch._functorch`'s partitioner, told a share of memory."""
    config: Any = functorch_config
    config.activation_memory_budget = ac.memory_budget if ac.mode == "memory_budget" else 1.0
    config.visualize_memory_budget_pareto = ac.mode == "memory_budget" and ac.visualize_memory_budget_pareto
    config.memory_budget_pareto_dir = folder
