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
    string: the heap is corrupted, and the process dies sooner or later. Names of up to 15
    characters need no heap, but the name of DTensor's gathers, ALLGATHER_COALESCED, does.

    torch 2.11 to 2.15. Delete once `ProcessGroupGloo` locks what its threads write.
    """
    from torch.distributed import ProcessGroupGloo, Store

    original_init = ProcessGroupGloo.__init__

    def init_with_one_thread(
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

    ProcessGroupGloo.__init__ = init_with_one_thread


@contextmanager
def store_of_this_attempt(rank: int, world: int, timeout: timedelta) -> Iterator[dist.Store]:
    """torchrun's agent gives every attempt the same store, which still holds the addresses of the
    previous attempt.

    Yields the agent's store under a prefix that is unique to this attempt. Rank 0 chooses the
    prefix and answers the other ranks until the process group exists. Each rank asks by a random
    name, so answers can't be stale; those of previous attempts are harmless. Each of them makes
    three requests, and rank 0 two for all that have come since the last.

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
        asked = answered = 0
        while not ready.wait(0.05):
            before, asked = asked, store.add("attempt/asked", 0)
            if asked == before:
                continue
            asks = store.get("attempt/asks").decode()
            names = [asks[i : i + len(nonce)] for i in range(answered, len(asks), len(nonce))]
            if names:
                store.multi_set([f"attempt/answer/{name}" for name in names], [nonce] * len(names))
            answered = len(asks)

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
        operations: what `PipelineStage._get_init_p2p_neighbors_ops` returns.
        own_rank: this rank's place in the pipeline's group.
    """
    return [operation for operation in operations if operation.group_peer != rank]


def without_receive_buffers() -> AbstractContextManager[None]:
    """A pipeline stage allocates receive buffers for all microbatches when it is prepared, and
    never frees them.

    Within, it notes their shapes on the meta device instead. `allocate_receive_buffers` makes those
    of one microbatch when their receive is posted, and `drop_receive_buffers` leaves them to the
    computation.

    torch 2.11 to 2.14. Delete the three once pyproject.toml requires 2.15, whose stages do all
    this.
    """
    from torch.distributed.pipelining import stage

    make = stage._make_tensor_from_meta
    return replaced(
        stage, _make_tensor_from_meta=lambda example, device: make(example, torch.device("meta"))
    )


def allocate_receive_buffers(buffers: Iterable[Any], device: torch.device) -> None:
    """Before a receive is posted, see `without_receive_buffers`. `buffers` are torch's `_RecvInfo`.

    torch 2.11 to 2.14. Delete with `without_receive_buffers`.
    """
    for each in buffers:
        if each.buffer is not None and each.buffer.is_meta:
            each.buffer = torch.empty_like(each.buffer, device=device).requires_grad_(
                each.buffer.requires_grad
            )


def drop_receive_buffers(buffers: Iterable[Any]) -> None:
    """After a computation has taken what was received, see `without_receive_buffers`.

    torch 2.11 to 2.14. Delete with `without_receive_buffers`.
    """
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


def lay_out_gradients(weights: Iterable[torch.nn.Parameter]) -> None:
    """A backward for weights alone hands them their gradients as they were computed, where a whole
    backward copies a gradient whose strides aren't its weight's.

    Fused optimizers on the CPU then read the wrong elements, and those on CUDA fail.

    torch 2.11 to 2.15. Delete once `stage_backward_weight` accumulates as autograd does.
    """
    for weight in weights:
        gradient = weight.grad
        if gradient is not None and gradient.stride() != weight.stride():
            weight.grad = torch.empty_like(weight).copy_(gradient)
