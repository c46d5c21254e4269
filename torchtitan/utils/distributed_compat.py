"""Workarounds for faults in torch's process groups and pipelines, one function each, as in
`torch_compat`.
"""

import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan.utils.torch_compat import replaced

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


# ---- process groups


@cache
def run_gloo_in_order() -> None:
    """Give every gloo group that is created from now on one thread for its collectives.

    torch gives it two. Without a lock, both write the name of their last collective into one
    string, which corrupts the heap, and the process dies sooner or later. Names of up to 15
    characters need no heap, but the name of DTensor's gathers, ALLGATHER_COALESCED, does.

    torch 2.11 to 2.15. Delete once `ProcessGroupGloo` locks what its threads write.
    """
    from torch.distributed import ProcessGroupGloo, Store

    original_init = ProcessGroupGloo.__init__

    def init_single_thread(
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
        original_init(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init_single_thread


@contextmanager
def store_of_this_attempt(rank: int, world: int, timeout: timedelta) -> Iterator[dist.Store]:
    """torchrun's agent gives every attempt the same store, which still holds the addresses of the
    previous attempt.

    Yields the agent's store under a prefix that is unique to this attempt. Rank 0 chooses the
    prefix and answers the other ranks until the process group exists. Each rank asks with a
    random name, so it never reads an answer of a previous attempt. A rank makes three requests to
    the store, and rank 0 two for all questions since its previous answer.

    torch 2.11 to 2.13. Delete once torchrun's store is empty after a change of membership.
    """

    def connect() -> dist.TCPStore:
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, world, is_master=False, timeout=timeout)

    agent = connect()
    nonce = uuid.uuid4().hex
    if rank:
        agent.append("attempt/asks", nonce)
        agent.add("attempt/asked", 1)
        yield dist.PrefixStore(agent.get(f"attempt/answer/{nonce}").decode(), agent)
        return
    ready = threading.Event()

    def answer(store: dist.TCPStore) -> None:
        requests = position = 0
        while not ready.wait(0.05):
            before, requests = requests, store.add("attempt/asked", 0)
            if requests == before:
                continue
            asks = store.get("attempt/asks").decode()
            names = [asks[i : i + len(nonce)] for i in range(position, len(asks), len(nonce))]
            if names:
                store.multi_set([f"attempt/answer/{name}" for name in names], [nonce] * len(names))
            position = len(asks)

    thread = threading.Thread(target=answer, args=(connect(),), name="rendezvous", daemon=True)
    thread.start()
    try:
        yield dist.PrefixStore(nonce, agent)
    finally:
        ready.set()
        thread.join()


# ---- pipelines


def without_self_connections(operations: list[dist.P2POp], rank: int) -> list[dist.P2POp]:
    """A V-shaped pipeline has two neighbouring stages on its last rank, and torch makes gloo
    connect it to itself.

    torch before 2.13. Delete once pyproject.toml requires 2.13.

    Args:
        operations: the result of `PipelineStage._get_init_p2p_neighbors_ops`.
        rank: this rank in the pipeline's group.
    """
    return [operation for operation in operations if operation.group_peer != rank]


def without_receive_buffers() -> AbstractContextManager[None]:
    """A pipeline stage allocates receive buffers for all microbatches when it is prepared, and
    never frees them.

    Within, it creates them on the meta device instead. `allocate_receive_buffers` allocates the
    buffers of one microbatch when their receive is posted, and `drop_receive_buffers` drops the
    stage's references, so that the computation frees them.

    torch 2.11 to 2.14. Delete the three once pyproject.toml requires 2.15, whose stages do all
    this.
    """
    from torch.distributed.pipelining import stage

    make = stage._make_tensor_from_meta
    return replaced(
        stage, _make_tensor_from_meta=lambda example, device: make(example, torch.device("meta"))
    )


def allocate_receive_buffers(buffers: Iterable[Any], device: torch.device) -> None:
    """Called before a receive is posted, with torch's `_RecvInfo`; see `without_receive_buffers`.

    torch 2.11 to 2.14. Delete with `without_receive_buffers`.
    """
    for info in buffers:
        if info.buffer is not None and info.buffer.is_meta:
            info.buffer = torch.empty_like(info.buffer, device=device).requires_grad_(
                info.buffer.requires_grad
            )


def drop_receive_buffers(buffers: Iterable[Any]) -> None:
    """Called after a computation has used the buffers; see `without_receive_buffers`.

    torch 2.11 to 2.14. Delete with `without_receive_buffers`.
    """
    for info in buffers:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device="meta").requires_grad_(
                info.buffer.requires_grad
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
    """Between its backwards for inputs and weights, a stage keeps its output and the gradient of
    its input.

    The second backward starts from gradients inside the stage, which `param_groups` holds, and
    needs neither. The first stage has a single backward, which needs both.

    torch 2.11 to 2.15. Delete once `backward_one_chunk` of such a stage keeps `param_groups` only.
    """
    if stage.is_first:
        return
    inputs, groups, *_ = stage.backward_state[microbatch]
    for info in inputs:
        info.grad = None
    stage.backward_state[microbatch] = (), groups, (), None


def lay_out_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """A backward for weights alone stores gradients as computed, while a whole backward copies a
    gradient whose strides differ from its weight's.

    Then fused optimizers read the wrong elements on the CPU, and fail on CUDA.

    torch 2.11 to 2.15. Delete once `stage_backward_weight` accumulates as autograd does.
    """
    for weight in weights:
        gradient = weight.grad
        if gradient is not None and gradient.stride() != weight.stride():
            weight.grad = torch.empty_like(weight).copy_(gradient)
