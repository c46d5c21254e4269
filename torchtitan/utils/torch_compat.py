"""Workarounds for faults in torch, one function each. Process groups and pipelines have theirs in
`distributed_compat`, and torchao in `torchao_compat`.

Every docstring states the fault, the affected releases, and when to delete the function. The
workarounds for DCP's staging are methods of a class in `torchtitan.checkpoint.save`. torch is
imported inside the functions, because the configuration needs its version without loading it.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torchtitan.utils.torch_versions import feature_release, installed_torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor, Placement


@cache
def torch_is_before_2_13() -> bool:
    """Whether the installed torch is 2.11 or 2.12. False without torch, on a host that only checks
    configurations.

    torch before 2.13. Delete it with its last caller, once pyproject.toml requires 2.13.
    """
    release = installed_torch()
    return release is not None and feature_release(release) < (2, 13)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner`, a module or one of torch's configurations, and restore them at the
    end.
    """
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


# ---- false alarms

_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # FSDP2 of torch 2.13 and parallel/context/attention.py call collectives by names that are
    # deprecated since; 2.11 has no others. torch 2.13 to 2.15. Delete once
    # pyproject.toml requires 2.14 and parallel/context/attention.py calls the new names.
    (
        ".*(all_gather_into_tensor|all_gather_tensor_autograd|reduce_scatter_tensor).*",
        FutureWarning,
    ),
    # FSDP2 warns about modules that return views, but only in-place operations on a view are a
    # problem. Hidden states between stages and gathered logits are views, and nothing modifies them
    # in place. torch 2.13 to 2.15. Delete once FSDP2 warns of in-place operations only.
    (".*FSDP2-wrapped module .* returned a view tensor.*", UserWarning),
    # `enable_symm_mem_for_group` is deprecated as unnecessary, but the micro-pipeline pass fuses
    # nothing without it. torch 2.11 to 2.15. Delete once the pass no longer asks
    # `is_symm_mem_enabled_for_group`.
    (".*enable_symm_mem_for_group.*", FutureWarning),
    # `_set_pg_timeout` is called `set_timeout` now, but not yet in 2.13.
    # torch 2.14 to 2.15. Delete once pyproject.toml requires 2.14, and call the new name.
    (".*_set_pg_timeout.*", FutureWarning),
)
_LOGGERS = (
    # Gathering a weight sharded by both FSDP and tensor parallelism needs one collective per axis,
    # which is logged as slow. It happens only when checkpoints are exported or runs compared. torch
    # 2.11 to 2.15. Delete once the warning can be switched off for one redistribution.
    "torch.distributed.tensor._redistribute",
    # Every compiled, checkpointed block is reported as possibly containing in-place operations.
    # Ours don't. torch 2.11 to 2.15. Delete once the warning depends on the block.
    "torch._higher_order_ops.wrap",
    # The micro-pipeline pass warns about every graph without collectives, such as the loss. torch
    # 2.11 to 2.15. Delete once it is silent about such graphs; `FusionReport` names the
    # collectives that matter.
    "torch._inductor.fx_passes.micro_pipeline_tp",
    # torchao warns on import about each GPU kernel it can't load, on machines without a GPU too.
    # torchao 0.18. Delete once importing it on a CPU is silent.
    "torchao",
    # torchao registers an enumeration as a constant of compiled graphs, which is logged as
    # deprecated. torch 2.14 to 2.15, torchao 0.18. Delete once importing torchao logs nothing.
    "torch.utils._pytree",
)


def silence_false_alarms() -> None:
    """Silence torch's and torchao's warnings about code that is correct. May be called repeatedly.

    Each entry of `_WARNINGS` and `_LOGGERS` has its releases and its condition. Delete the function
    with the last one.
    """
    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


# ---- compilation


def keep_buffers_of_backward() -> AbstractContextManager[None]:
    """A compiled backward frees saved tensors after its first run, but a pipeline schedule may run
    it in two steps.

    torch 2.11 to 2.15. Delete once AOTAutograd keeps buffers that a `retain_graph` backward needs
    again.
    """
    from torch._functorch import config

    return replaced(config, donated_buffer=False)


def forget_equal_meshes() -> None:
    """Let results of DTensor's operations be on the mesh of the run that begins.

    Its caches of shardings return an equal mesh of an earlier run of this process. A graph doesn't
    have that object as an input, and derives it by an operation that inductor refuses:
    "device_mesh._get_submesh is not an OpOverload". torch 2.13. Delete once it compiles.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def no_shared_autograd_cache() -> AbstractContextManager[None]:
    """The keys of AOTAutograd's cache don't distinguish ranks, so a rank can load another's graph.

    Under tensor parallelism those graphs differ: each contains the offset of its shard of the
    vocabulary. Inductor's own cache, keyed by the finished graph, is not affected.

    torch 2.11 to 2.13. Delete once a rank's coordinates in a DTensor's mesh are part of the key.
    """
    from torch._functorch import config

    return replaced(config, enable_autograd_cache=False)


def attention_without_random_numbers() -> AbstractContextManager[None]:
    """The partitioner mistakes recomputed attention for a random operation, even without dropout.

    It moves the generator's state around both calls, and under tensor parallelism mistakes a saved
    device mesh for that state. Within, attention without dropout isn't random.

    torch 2.11 to 2.13; 2.15 considers the probability. Delete once pyproject.toml requires 2.15.
    """
    from torch._functorch import partitioners

    has_recomputable_rng_ops = partitioners.has_recomputable_rng_ops

    def ignores_attention(module: Any) -> bool:
        nodes = [node for node in module.graph.nodes if not _attends_without_dropout(node)]
        graph = SimpleNamespace(nodes=nodes)
        return has_recomputable_rng_ops(SimpleNamespace(graph=graph))

    return replaced(partitioners, has_recomputable_rng_ops=ignores_attention)


def _attends_without_dropout(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "_attention" not in str(node.target) or "dropout_p" not in names:
        return False
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return arguments.get("dropout_p", 0.0) == 0.0


def softplus(x: "Tensor") -> "Tensor":
    """The gradient of `F.softplus` has the layout of the incoming gradient, but the compiler
    assumes the input's; a graph that views it fails.

    torch 2.13. Delete once tests/unit/test_delta.py passes with `F.softplus` here.
    """
    import torch

    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


# ---- tensor parallelism


def redistribute_and_wait(x: "DTensor", placements: "Sequence[Placement]") -> "DTensor":
    """A compiled block loses the gradient of an `AsyncCollectiveTensor` passed to it.

    torch 2.13. Delete once `DTensor.redistribute` can be asynchronous in front of a compiled block.
    """
    return x.redistribute(placements=placements, async_op=False)


def gathers_without_views() -> AbstractContextManager[None]:
    """At batch size 1 an all-gather along the sequence returns a view, which inductor doesn't
    recognize as a gather.

    Within, gathered shards are always concatenated.

    torch 2.13. Delete once the micro-pipeline pass matches the view.
    """
    import torch
    import torch.distributed._functional_collectives as collectives

    def concatenated(gathered: "Tensor", ranks: int, dim: int) -> "Tensor":
        return torch.cat(torch.chunk(gathered, ranks, dim=0), dim=dim)

    return replaced(collectives, _maybe_view_chunk_cat=concatenated)


def micro_pipeline_without_nccl() -> AbstractContextManager[None]:
    """The micro-pipeline pass gives up if torch was built without NCCL, even if the fused operators
    have kernels.

    Within, torch claims to have NCCL for the duration of each run of that pass, and at no other
    time.

    torch 2.11 to 2.15. Delete once the pass asks only whether symmetric memory is enabled for the
    group.
    """
    import torch.distributed as dist
    from torch._inductor.fx_passes import post_grad

    micro_pipeline: Callable[[Any], None] = post_grad.micro_pipeline_tp_pass

    def micro_pipeline_with_nccl(graph: Any) -> None:
        with replaced(dist, is_nccl_available=lambda: True):
            micro_pipeline(graph)

    return replaced(post_grad, micro_pipeline_tp_pass=micro_pipeline_with_nccl)
