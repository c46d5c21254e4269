"""Measure the rates of collectives: within a node, and between nodes."""

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ROUNDS = 5
"""Collectives of which the fastest counts, after a first one that sets up connections."""


@dataclass(frozen=True)
class Links:
    """Bytes/s per rank of an all-gather: those that it receives over the seconds that it takes.
    None: not measured.
    """

    link: float | None
    """Among the ranks of a node."""
    network: float | None
    """Among one rank of each node."""
    ranks_per_node: int


def ranks_per_node() -> int:
    """Ranks that torchrun started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def measure_links(device: torch.device, per_node: int, size: int) -> Links:
    """Measure all-gathers, on all ranks of the default process group at once.

    Args:
        per_node: ranks of each node.
        size: bytes that a collective gathers.
    """
    world = dist.get_world_size()
    rank = dist.get_rank()
    link = network = None
    if per_node > 1:
        nodes = [list(range(first, first + per_node)) for first in range(0, world, per_node)]
        link = _gathered(nodes, rank, device, size)
    if world > per_node:
        network = _gathered([list(range(0, world, per_node))], rank, device, size)
    return Links(link, network, per_node)


def _gathered(
    groups: list[list[int]],
    rank: int,
    device: torch.device,
    size: int,
) -> float:
    """Rate of the slowest group; the groups gather at the same time, as FSDP's do."""
    made = [dist.new_group(members) for members in groups]
    seconds = 0.0
    for members, group in zip(groups, made, strict=True):
        if rank in members:
            seconds = _seconds(group, len(members), device, size)
    n = len(groups[0])
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    for group in made:
        dist.destroy_process_group(group)
    return size * (n - 1) / n / slowest.item()


def _seconds(
    group: dist.ProcessGroup,
    ranks: int,
    device: torch.device,
    size: int,
) -> float:
    own = torch.empty(size // ranks, dtype=torch.uint8, device=device)
    whole = torch.empty(size // ranks * ranks, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        dist.all_gather_into_tensor(whole, own, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
