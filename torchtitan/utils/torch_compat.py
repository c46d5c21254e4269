"""Workarounds for faults in torch, one function each; those for torchao are in `torchao_compat`.

Every docstring states the fault, the releases it was seen in, and when to delete the function.
Those of DCP's staging are methods of one class in `torchtitan.checkpoint.staging`. torch is
imported inside the functions, because the configuration asks for its version without loading it.
"""

import logging
import os
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from torchtitan.utils.torch_versions import feature_release, installed_torch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor import DTensor, Placement


@cache
def torch_is_before_2_13() -> bool:
    """Whether the installed torch is 2.11 or 2.12. False on a host without torch, which only checks
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
    # FSDP2 of torch 2.13 and torchtitan.parallel.context call collectives by names that are
    # deprecated since, and of which 2.11 knows no others. torch 2.13 to 2.15. Delete once
    # pyproject.toml requires 2.14 and torchtitan.parallel.context calls the new names.
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
    # Gathering a weight sharded by both FSDP and tensor parallelism takes one collective per axis,
    # which is logged as slow. It happens only when checkpoints are exported or runs compared. torch
    # 2.11 to 2.15. Delete once the warning can be switched off for one redistribution.
    "torch.distributed.tensor._redistribute",
    # Every compiled, checkpointed block is reported as possibly containing in-place operations.
    # Ours don't. torch 2.11 to 2.15. Delete once the warning depends on the block.
    "torch._higher_order_ops.wrap",
    # The micro-pipeline pass warns about every graph without collectives, such as the loss. torch
    # 2.11 to 2.15. Delete once it is silent about those; `FusionReport` names the collectives that
    # matter.
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
        warnings.filterwarnings(
            "ignore",
            message=message,
            category=category,
        )
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


# ---- compilation


def keep_buffers_of_backward() -> AbstractContextManager[None]:
    """A compiled backward frees saved tensors after its first run, but a pipeline schedule may run
    it in two parts.

    torch 2.11 to 2.15. Delete once AOTAutograd keeps buffers that a `retain_graph` backward needs
    again.
    """
    from torch._functorch import config

    return replaced(config, donated_buffer=False)


def forget_equal_meshes() -> None:
    """Let results of DTensor's operations be on the mesh of the run that begins.

    Its caches of shardings return the mesh that an equal one had in an earlier run of this process.
    A graph doesn't know that object, and derives it by an operation that inductor refuses:
    "device_mesh._get_submesh is not an OpOverload". torch 2.13. Delete once it compiles.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def no_shared_autograd_cache() -> AbstractContextManager[None]:
    """The keys of AOTAutograd's cache don't distinguish ranks, so a rank can load another's graph.

    Under tensor parallelism those graphs differ: each contains the offset of its part of the
    vocabulary. Inductor's own cache, keyed by the finished graph, is not affected.

    torch 2.11 to 2.13. Delete once a rank's coordinates in a DTensor's mesh are part of the key.
    """
    from torch._functorch import config

    return replaced(config, enable_autograd_cache=False)


def must_save_attention(*, compiled: bool, tp_degree: int) -> bool:
    """A compiled block under tensor parallelism can't recompute attention.

    The partitioner treats SDPA as a random operation and mistakes the saved device mesh for the
    generator's state.

    torch 2.13. Delete once tests/distributed/test_compile.py passes for `tp 2` with this returning
    False.
    """
    return compiled and tp_degree > 1


def softplus(x: "Tensor") -> "Tensor":
    """The gradient of `F.softplus` is laid out like the gradient it is given, but the compiler is
    told like the input; a graph that views it fails.

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

    Within, gathered parts are always concatenated.

    torch 2.13. Delete once the micro-pipeline pass matches the view.
    """
    import torch
    import torch.distributed._functional_collectives as collectives

    def concatenated(
        gathered: "Tensor",
        ranks: int,
        dim: int,
    ) -> "Tensor":
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

    def with_nccl(graph: Any) -> None:
        with replaced(dist, is_nccl_available=lambda: True):
            micro_pipeline(graph)

    return replaced(post_grad, micro_pipeline_tp_pass=with_nccl)


# ---- process groups and pipelines


@cache
def run_gloo_in_order() -> None:
    """Give every gloo group that is created from now on one thread for its collectives.

    torch gives it two. Without a lock, both write the name of their last collective into one
    string: the heap is corrupted, and the process dies sooner or later. Names of up to 15
    characters need no heap, but those of DTensor's gathers, ALLGATHER_COALESCED, do.

    torch 2.11 to 2.15. Delete once `ProcessGroupGloo` locks what its threads write.
    """
    from torch.distributed import ProcessGroupGloo, Store

    with_two_threads = ProcessGroupGloo.__init__

    def with_one_thread(
        group: ProcessGroupGloo,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        **since_2_15: Any,
    ) -> None:
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._threads = 1
        options._devices = [
            ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",") if name
        ] or [ProcessGroupGloo.create_default_device()]
        for name, value in since_2_15.items():
            setattr(options, name, value)
        with_two_threads(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = with_one_thread


@contextmanager
def store_of_this_attempt(
    rank: int,
    world: int,
    timeout: timedelta,
) -> Iterator["dist.Store"]:
    """torchrun's agent gives every attempt the same store, which still holds the addresses of the
    previous attempt.

    Yields the agent's store under a prefix that is unique to this attempt. Rank 0 chooses the
    prefix and answers the other ranks until the process group exists. Each rank asks by a random
    name, so answers can't be stale; those of previous attempts are harmless. Each of them makes
    three requests, and rank 0 two for all that have come since the last.

    torch 2.11 to 2.13. Delete once torchrun's store is empty after a change of membership.
    """
    import torch.distributed as dist

    def connect() -> dist.TCPStore:
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore(
            host,
            port,
            world,
            is_master=False,
            timeout=timeout,
        )

    agent = connect()
    own = uuid.uuid4().hex
    if rank:
        agent.append("attempt/asks", own)
        agent.add("attempt/asked", 1)
        yield dist.PrefixStore(agent.get(f"attempt/answer/{own}").decode(), agent)
        return
    ready = threading.Event()

    def answer(store: dist.TCPStore) -> None:
        asked = answered = 0
        while not ready.wait(0.05):
            before, asked = asked, store.add("attempt/asked", 0)
            if asked == before:
                continue
            asks = store.get("attempt/asks").decode()
            names = [asks[i : i + len(own)] for i in range(answered, len(asks), len(own))]
            if names:
                store.multi_set([f"attempt/answer/{name}" for name in names], [own] * len(names))
            answered = len(asks)

    thread = threading.Thread(
        target=answer,
        args=(connect(),),
        name="rendezvous",
        daemon=True,
    )
    thread.start()
    try:
        yield dist.PrefixStore(own, agent)
    finally:
        ready.set()
        thread.join()


def without_self_connections(operations: "list[dist.P2POp]", own_rank: int) -> "list[dist.P2POp]":
    """A V-shaped pipeline has two neighbouring stages on its last rank, and torch makes gloo
    connect it to itself.

    torch before 2.13. Delete once pyproject.toml requires 2.13.

    Args:
        operations: what `PipelineStage._get_init_p2p_neighbors_ops` returns.
        own_rank: this rank's place in the pipeline's group.
    """
    return [operation for operation in operations if operation.group_peer != own_rank]


def without_receive_buffers() -> AbstractContextManager[None]:
    """A pipeline stage allocates receive buffers for all microbatches when it is prepared, and
    never frees them.

    Within, it notes their shapes on the meta device instead. `allocate_receive_buffers` makes those
    of one microbatch when their receive is posted, and `drop_receive_buffers` leaves them to the
    computation.

    torch 2.11 to 2.14. Delete the three once pyproject.toml requires 2.15, whose stages do all
    this.
    """
    import torch
    from torch.distributed.pipelining import stage

    make = stage._make_tensor_from_meta
    return replaced(
        stage, _make_tensor_from_meta=lambda example, device: make(example, torch.device("meta"))
    )


def allocate_receive_buffers(buffers: "Iterable[Any]", device: "torch.device") -> None:
    """Before a receive is posted, see `without_receive_buffers`. `buffers` are torch's `_RecvInfo`.

    torch 2.11 to 2.14. Delete with `without_receive_buffers`.
    """
    import torch

    for each in buffers:
        if each.buffer is not None and each.buffer.is_meta:
            each.buffer = torch.empty_like(each.buffer, device=device).requires_grad_(
                each.buffer.requires_grad
            )


def drop_receive_buffers(buffers: "Iterable[Any]") -> None:
    """After a computation has taken what was received, see `without_receive_buffers`.

    torch 2.11 to 2.14. Delete with `without_receive_buffers`.
    """
    import torch

    for each in buffers:
        if each.buffer is not None:
            each.buffer = torch.empty_like(each.buffer, device="meta").requires_grad_(
                each.buffer.requires_grad
            )


def forget_output(last: "PipelineStage", microbatch: int) -> None:
    """A pipeline's last stage keeps its output, the logits, until its backward ends, though only
    the loss needs them.

    torch 2.11 to 2.15. Delete once `forward_one_chunk` of a last stage keeps its inputs only.
    """
    if hasattr(last, "_forward_chunk_states"):  # since 2.15
        state = last._forward_chunk_states[microbatch]
        state.live_outputs = []
        state.output_grad_edges = ()
    else:
        last.fwd_cache[microbatch] = (), last.fwd_cache[microbatch][1]


def forget_what_weights_do_not_need(stage: "PipelineStage", microbatch: int) -> None:
    """Between its backward for inputs and that for weights, a stage keeps its output and the
    gradient of its input.

    The second backward needs neither, except on the first stage, whose only backward it is: it
    starts from gradients inside the stage, which `param_groups` holds.

    torch 2.11 to 2.15. Delete once `backward_one_chunk` of such a stage keeps `param_groups` only.
    """
    if stage.is_first:
        return
    inputs, groups, *_ = stage.backward_state[microbatch]
    for each in inputs:
        each.grad = None
    stage.backward_state[microbatch] = (), groups, (), None
