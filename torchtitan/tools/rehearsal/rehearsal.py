"""Rehearse ranks of a configuration, each in its own process, and compare them."""

import gc
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from torchtitan.config.derive import axis_degrees
from torchtitan.config.registry import import_custom
from torchtitan.config.sections.schema import Config
from torchtitan.tools.rehearsal.events import RankRecord
from torchtitan.tools.rehearsal.mismatches import (
    Counts,
    Fault,
    check_collectives,
    check_exchanges,
    check_groups,
    check_messages,
    errors,
)
from torchtitan.tools.rehearsal.rank_sample import VALUES, RankSample, corners
from torchtitan.tools.rehearsal.waits import check_circles
from torchtitan.utils.signals import end_with_starter, start_fork_server

EVERY_RANK_BELOW = 64
"""Number of ranks below which all are rehearsed by default. Each takes seconds of CPU time."""
RANKS_PER_NODE = 8
_MAY_DEPEND_ON_DATA = ("collectives", "messages", "error", "groups")


@dataclass(frozen=True)
class Rehearsal:
    """The records of the rehearsed ranks, and their faults."""

    config: Config
    world: int
    layers: int
    """Largest number of layers of a stage that ran."""
    records: dict[int, RankRecord]
    """Rank to its record."""
    counts: Counts
    faults: list[Fault]


def rehearse(
    config: Config, world: int, *, ranks: Sequence[int] = (), layers: int | None = None
) -> Rehearsal:
    """Rehearse a configuration, in as many processes at a time as there are cores.

    Args:
        config: derived and validated for `world` ranks.
        ranks: more ranks to rehearse, besides those that represent all others.
        layers: number of layers of each pipeline stage to run; None: enough to show all
            communication.
    """
    # FSDP gathers a layer while another one computes. A pipeline's schedule gathers whole stages.
    layers = layers or (1 if config.parallelism.pipeline_parallel_degree > 1 else 2)
    degrees = axis_degrees(config.parallelism)
    sample = RankSample({*corners(degrees), *ranks}, degrees)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan.tools.rehearsal.rank"])
    start_fork_server()
    processes = min(_cores(), len(sample.ranks))
    with ProcessPoolExecutor(
        processes, context, initializer=end_with_starter, max_tasks_per_child=1
    ) as pool:

        def run(*options: Any) -> Future[RankRecord]:
            return pool.submit(_in_new_process, config, world, layers, *options)

        records = {0: run(0, sample.values(0), None).result()}
        broadcasts = records[0].broadcasts
        others = sorted(sample.ranks - {0})
        running = {rank: run(rank, sample.values(rank), broadcasts) for rank in others}
        records |= {rank: future.result() for rank, future in running.items()}
        counts, faults = compare(
            records,
            sample,
            lambda rank, values: run(rank, values, broadcasts if rank else None).result(),
        )
    return Rehearsal(config, world, layers, records, counts=counts, faults=faults)


def compare(
    records: dict[int, RankRecord], sample: RankSample, again: Callable[[int, int], RankRecord]
) -> tuple[Counts, list[Fault]]:
    """The counts of what was compared, and the faults.

    Args:
        again: rehearses a rank once more, with other made-up values of its own data.
    """
    counts = Counts()
    faults = [
        _explain(fault, records[fault.rank], sample.values(fault.rank), again)
        if fault.rank in records and fault.kind in _MAY_DEPEND_ON_DATA
        else fault
        for fault in check(records, sample, counts)
    ]
    return counts, faults


def check(records: dict[int, RankRecord], sample: RankSample, counts: Counts) -> list[Fault]:
    """Faults of the first check that finds any; later checks assume that earlier ones passed. What
    ranks did before an exception comes first, because it may have caused it.
    """
    return (
        check_groups(records)
        or check_collectives(records, sample, counts)
        or errors(records)
        or check_messages(records, sample, counts)
        or check_exchanges(records, counts)
        or check_circles(records)
    )


def _explain(
    fault: Fault, before: RankRecord, values: int, again: Callable[[int, int], RankRecord]
) -> Fault:
    """The fault, attributed to the rank's own data if it acts differently with other values, and
    has read any before.
    """
    rank = fault.rank
    actions = attrgetter("creations", "error", "events")
    others = (again(rank, other) for other in range(len(VALUES)) if other != values)
    after = next((record for record in others if actions(record) != actions(before)), before)
    pairs = enumerate(zip_longest(before.events, after.events))
    first = next((i for i, (earlier, later) in pairs if earlier != later), len(before.events))
    lines = [line for position, line in before.local_reads if position <= first]
    if after is before or not lines:
        return fault
    where = f"rank {rank} depends on a value of its own data, which it reads at {lines[-1]}"
    return Fault("data", rank, f"{where}: {fault.text}")


def _cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_new_process(config: Config, world: int, layers: int, rank: int, *others: Any) -> RankRecord:
    """`rehearse_rank` in a new process."""
    from torchtitan.tools.rehearsal.rank import rehearse_rank  # imports torch

    os.environ |= torchrun_variables(world, rank)
    gc.freeze()  # the trainer's collection needn't scan torch's objects
    if config.experimental.custom_import:
        import_custom(config.experimental.custom_import)
    return rehearse_rank(config, world, layers, rank, *others)


def torchrun_variables(world: int, rank: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank, on nodes with as many ranks each."""
    local = world if world < RANKS_PER_NODE else math.gcd(world, RANKS_PER_NODE)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": world // local,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in variables.items()}
