"""A save by all ranks, with the planner and writer of `torch.distributed.checkpoint` (DCP) but
without its collectives: through them, the plans of all ranks would pass through rank 0.
"""

import concurrent.futures
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint.exchange import Exchange
from torchtitan.checkpoint.layout import Layout, shares
from torchtitan.checkpoint.manifest import Written
from torchtitan.checkpoint.writer import CommittingWriter
from torchtitan.utils.errors import FormatBugError


def save(
    state: dict[str, Any] | concurrent.futures.Future[dict[str, Any]],
    writer: CommittingWriter,
    planner: DefaultSavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    places: int = 1,
    alone: bool = False,
) -> None:
    """Save a checkpoint, on all ranks together.

    Each rank derives what it writes. Ranks exchange a few numbers three times: to begin, when all
    have written, and when rank 0 has committed.

    Args:
        state: the tensors by part and name, or what will be.
        group: of all ranks, with gloo; None: the default one.
        places: of the pipeline; ranks at one of them hold the same tensors, or shards of them.
        alone: this process saves by itself.

    Raises:
        RankError: it failed on some rank; on every rank the same.
    """
    exchange = Exchange(group, alone=alone)
    rank = exchange.rank
    planner = planner or DefaultSavePlanner()
    layouts: dict[str, Layout | None] = {}
    plan = SavePlan([])

    def prepare() -> tuple[int, int]:
        nonlocal plan
        tensors = state.result() if isinstance(state, concurrent.futures.Future) else state
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        plan, agreed = own_plan(planner, rank, exchange.world, places, layouts)
        return (writer.begin() if rank == 0 else 0), agreed

    def write() -> tuple[int, int]:
        results = writer.write_data(plan, planner).wait()
        return writer.describe(number, rank, plan, layouts, results)

    def finish() -> tuple[()]:
        if rank == 0:
            writer.finish(number, Written(ranks=exchange.world, files=files, bytes=size))
        return ()

    begun, differs = exchange.step(prepare)[:2]
    if differs:
        raise FormatBugError(
            "ranks hold different tensors: this is a bug in torchtitan, please report it"
        )
    number = f"{begun:016x}"
    files, size = exchange.step(write)[:2]
    exchange.step(finish)


def own_plan(
    planner: DefaultSavePlanner,
    rank: int,
    world: int,
    places: int,
    layouts: dict[str, Layout | None],
) -> tuple[SavePlan, int]:
    """What this rank writes.

    Args:
        layouts: receives that of each tensor.

    Returns:
        The plan, and a number whose sum over all ranks is 0 (modulo 2^64) if all ranks at each
        place of the pipeline hold the same tensors.
    """
    count = world // places
    holders = range(rank // count * count, (rank // count + 1) * count)
    found, digest = shares(planner.state_dict, rank, holders)
    items = []
    plan = planner.create_local_plan()
    for item in plan.items:
        share = found[item.index.fqn]
        about = item.tensor_data
        assert about is not None, f"{item.index.fqn} is not a tensor"
        layouts[item.index.fqn] = share.layout
        whole = item.type is WriteItemType.TENSOR or not isinstance(
            planner.state_dict[item.index.fqn], DTensor
        )
        if not share.writes or not (about.chunk.sizes.numel() or rank == share.layout.first):
            continue
        box = share.layout.box(tuple(about.size), rank)
        if not whole and box != (tuple(about.chunk.offsets), tuple(about.chunk.sizes)):
            layouts[item.index.fqn] = None
        items.append(item)
    place = _StoragePrefix(f"__{rank}_")
    leads = rank == holders.start
    agreed = digest * (count - 1) if leads else -digest
    return replace(plan, items=items, storage_data=place), _wrapped(agreed)


def _wrapped(number: int) -> int:
    """A number modulo 2^64, as an int64."""
    return (number + 2**63) % 2**64 - 2**63
