"""Process groups: initialization and timeouts."""

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from torchtitan.config.sections.schema import Comm
from torchtitan.utils.activity import CHECKPOINT_GROUP
from torchtitan.utils.distributed_compat import run_gloo_in_order, store_of_this_attempt
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.logging import logger
from torchtitan.utils.process import CONNECTED_RANKS, rank_and_world
from torchtitan.utils.torch_compat import silence_false_alarms


def init_distributed(comm: Comm, device: torch.device) -> None:
    """Initialize the default process group: NCCL on CUDA, gloo on the CPU; and `cpu_group`.

    Under torchrun, the rendezvous comes from the environment. Without torchrun, the world is this
    process alone. If all ranks are on one node, they listen on its loopback interface only.
    """
    silence_false_alarms()
    run_gloo_in_order()
    rank, world = rank_and_world()
    if world > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError([f"WORLD_SIZE={world} needs RANK, MASTER_ADDR, MASTER_PORT; or unset it"])
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    on_cuda = device.type == "cuda"
    single_node = os.environ.get("LOCAL_WORLD_SIZE", "1") == str(world)
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world > CONNECTED_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    for backend in ("GLOO", "NCCL")[: 1 + on_cuda]:
        if single_node and f"{backend}_SOCKET_IFNAME" not in os.environ:
            os.environ[f"{backend}_SOCKET_IFNAME"] = _loopback()

    def start(store: dist.Store | None) -> None:
        membership = {} if store is None else {"store": store, "rank": rank, "world_size": world}
        # No device_id: torch would split the groups of mesh axes from this one, which hung on some
        # clusters.
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timeout, **membership)
        cpu_group(timeout)

    if agent_has_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        with store_of_this_attempt(rank, world, timeout) as store:
            start(store)
            # Until then, late ranks ask; pairs that connect later don't wait.
            dist.barrier(cpu_group())
    elif world == 1:
        start(dist.HashStore())
    elif single_node and not agent_has_store:
        start(_local_store(rank, world, timeout))
    else:
        start(None)


def _loopback() -> str:
    """Name of the loopback interface: `lo` on Linux, `lo0` on macOS.

    Raises:
        ConfigError: there is none, or it is down, as in a container without network.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise ConfigError(
        [
            "the ranks of a node, and one alone, communicate over its loopback interface, which is "
            "down: `ip link set lo up` as root, or name another in GLOO_SOCKET_IFNAME"
        ]
    )


def _local_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store of ranks that are all on this node. torch's own would listen on all interfaces."""
    host = "127.0.0.1"
    port = int(os.environ["MASTER_PORT"])
    listen_fd = socket.create_server((host, port)).detach() if rank == 0 else None
    return dist.TCPStore(host, port, world, rank == 0, timeout, master_listen_fd=listen_fd)


_cpu_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def cpu_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """All ranks, for objects and tensors on the CPU: the default group, or a group with gloo
    if the default has NCCL only.

    Its collectives belong to the main thread. Saves, which run in the background, have their own.

    Args:
        timeout: for a group that all ranks create now; None: torch's default.
    """
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    if torch.device("cpu") in world._device_types:
        return world
    if world not in _cpu_groups:
        _cpu_groups.clear()  # of a default group that ended
        _cpu_groups[world] = dist.new_group(backend="gloo", timeout=timeout, group_desc="cpu")
    return _cpu_groups[world]


def barrier() -> None:
    """Wait for all ranks, and on CUDA for the device's pending work."""
    on_cuda = "nccl" in str(dist.get_backend_config())
    dist.barrier(device_ids=[torch.cuda.current_device()] if on_cuda else None)


def store_of_a_thread(prefix: str) -> dist.Store:
    """The job's key-value store below a prefix, with a connection that only one thread may use."""
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store().clone())


def limit_groups(seconds: int) -> None:
    """Set the timeout, in seconds, of all existing process groups except the one for saves.

    Groups created later have torch's default, 30 minutes.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != CHECKPOINT_GROUP:  # a save waits for storage
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def set_timeout(seconds: int) -> None:
    """Set the timeout, in seconds, of all process groups once the first, slow step is done."""
    if dist.get_world_size() == 1:
        return
    barrier()  # no rank may still be in its first step when the timeout shrinks
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    limit_groups(seconds)
    logger.info(f"Timeout of collectives is now {seconds} s")
