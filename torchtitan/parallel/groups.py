"""Process groups: start and time limits."""

import logging
import os
import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan.config.schema import Comm
from torchtitan.utils.logging import logger
from torchtitan.utils.phase import CHECKPOINT_GROUP

# torch 2.13 renamed collectives that FSDP2 still calls, and that torch 2.11 only has, by their old names.
warnings.filterwarnings(
    "ignore",
    message=".*(all_gather_into_tensor|all_gather_tensor_autograd|reduce_scatter_tensor).*",
    category=FutureWarning,
)
# Weights sharded by both FSDP and tensor parallelism are gathered whole along one axis after the other, and rarely.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# The hidden states between stages, and gathered logits, are views that nothing changes in place.
warnings.filterwarnings("ignore", message=".*FSDP2-wrapped module .* returned a view tensor.*")


def init_distributed(comm: Comm, device: torch.device) -> None:
    """Start the default process group: NCCL on CUDA with gloo beside it, gloo alone on the CPU.

    Under torchrun the rendezvous is read from the environment; without it the process is a world of its own.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    device_id = device if device.type == "cuda" else None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with fresh_store(rank, world, timeout) as store:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device_id
            )
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)


@contextmanager
def fresh_store(rank: int, world: int, timeout: timedelta) -> Iterator[dist.Store]:
    """The store of torchrun's agent, under a prefix of this attempt's own.

    A plain torchrun gives every attempt the same store, where the addresses of the one before still are. Rank 0 invents
    a prefix and, until the process group stands, tells it to every rank that asks with a new word of its own.
    """

    def connect() -> dist.TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, world, is_master=False, timeout=timeout)

    agent, own = connect(), uuid.uuid4().hex
    if rank:
        agent.set(f"attempt/ask/{rank}", own)
        yield dist.PrefixStore(agent.get(f"attempt/answer/{own}").decode(), agent)
        return
    ready = threading.Event()

    def answer(store: dist.TCPStore) -> None:
        while not ready.wait(0.05):
            for other in range(1, world):
                if store.check([f"attempt/ask/{other}"]):
                    word = store.get(f"attempt/ask/{other}").decode()  # maybe an earlier attempt's: answered in vain
                    store.set(f"attempt/answer/{word}", own)

    thread = threading.Thread(target=answer, args=(connect(),), name="rendezvous", daemon=True)
    thread.start()
    try:
        yield dist.PrefixStore(own, agent)
    finally:
        ready.set()
        thread.join()


def store_of_a_thread(prefix: str) -> dist.Store:
    """The job's key-value store, for keys of its own, by a connection that no other thread uses."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())


def limit_groups(seconds: int) -> None:
    """Set the time limit of the process groups there are, but that of saves. A later one has torch's half an hour."""
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != CHECKPOINT_GROUP:  # a save waits for disks
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def set_timeout(seconds: int) -> None:
    """Set the time limit of every process group, once the first step (compilation, lazy set-up) is over."""
    if dist.get_world_size() == 1:
        return
    dist.barrier()  # no rank may still be inside the slow part when the limit shrinks
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    limit_groups(seconds)
    logger.info(f"Time limit of collectives is now {seconds} s")
