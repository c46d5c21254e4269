"""Process groups: start, time limits, Flight Recorder."""

import ast
import logging
import os
import pickle
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config.schema import Comm
from torchtitan.distributed.diagnosis import CHECKPOINT_GROUP
from torchtitan.utils.files import write_whole
from torchtitan.utils.logging import logger

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

DUMPED = 2000
"""Collectives of a rank that are written: one rank reads those of all."""


def init_distributed(comm: Comm, dump_folder: str, device: torch.device) -> None:
    """Start the default process group: NCCL on CUDA with gloo beside it, gloo alone on the CPU.

    Under torchrun the rendezvous is read from the environment; without it the process is a world of its own.
    """
    configure_flight_recorder(comm, dump_folder)
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


def configure_flight_recorder(comm: Comm, dump_folder: str) -> None:
    """Set the Flight Recorder's environment, in the spellings of torch 2.11 and 2.13, before any group exists."""
    folder = Path(dump_folder, comm.save_traces_folder)
    size = str(comm.trace_buf_size)
    settings = {"TORCH_FR_BUFFER_SIZE": size}
    if not hasattr(dist, "all_gather_single"):  # before torch 2.13, parts of the recorder know only the old name
        settings["TORCH_NCCL_TRACE_BUFFER_SIZE"] = size
    if comm.trace_buf_size:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = str(folder / comm.save_traces_file_prefix)
        settings |= {
            "TORCH_FR_DUMP_TEMP_FILE": prefix,
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # 3 lets NCCL's watchdog write its dump before the process dies; torchrun presets 1.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        }
    os.environ.update(settings)


def dump_flight_recorder(comm: Comm, dump_folder: str, *, stacks: bool = True) -> None:
    """Write this rank's last collectives where `torchfrtrace` finds them.

    NCCL's watchdog dumps by itself on a time-out. gloo never does, keys its group table wrongly and leaves finished
    collectives marked as scheduled: mended here, or the analyzer fails on the file.

    Args:
        stacks: with the places that called the collectives, which can take seconds to look up.
    """
    trace = pickle.loads(_recorder()(includeStackTraces=stacks))
    if not _records_nccl():
        world = dist.distributed_c10d._world
        trace["pg_config"] = {
            world.pg_names[group]: {
                "name": world.pg_names[group],
                "desc": group.group_desc,
                "ranks": str(sorted(ranks)),
            }
            for group, ranks in list(world.pg_group_ranks.items())
            if isinstance(group, dist.ProcessGroup)
        }
        # The recorder outlives the groups it recorded; the analyzer knows only those of the table.
        trace["entries"] = [e for e in trace.get("entries", ()) if e["process_group"][0] in trace["pg_config"]]
        for entry in trace["entries"]:
            if entry["retired"]:
                entry["state"] = "completed"
            if entry["profiling_name"] == "gloo:all_gather":  # some record the shape of one part
                members = ast.literal_eval(trace["pg_config"][entry["process_group"][0]]["ranks"])
                entry["output_sizes"] = [[len(members), *size] for size in entry["input_sizes"]]
    trace["entries"] = trace.get("entries", [])[-DUMPED:]
    path = Path(dump_folder, comm.save_traces_folder, f"{comm.save_traces_file_prefix}{dist.get_rank()}")
    write_whole(path, pickle.dumps(trace))


def collective_counts() -> dict[str, dict[str, int]]:
    """How many collectives each process group has begun and completed."""
    return pickle.loads(_recorder()(includeCollectives=False, includeStackTraces=False)).get("pg_status", {})


def _records_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config()) and hasattr(torch._C._distributed_c10d, "_dump_nccl_trace")


def _recorder() -> Callable[..., bytes]:
    """What gives the Flight Recorder's contents, pickled: that of NCCL where it is in use, else gloo's."""
    c10d: Any = torch._C._distributed_c10d
    return c10d._dump_nccl_trace if _records_nccl() else c10d._dump_fr_trace


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
