"""Rehearse ranks of a configuration, each in its own process, and compare them."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing import forkserver
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
from torchtitan.utils.signals import end_with_starter

EVERY_RANK_BELOW = 64
"""Number of ranks below which all are rehearsed by default. Each takes seconds of CPU time."""
_MAY_DEPEND_ON_DATA = ("collectives", "messages", "error", "groups")


@dataclass(frozen=True)
class Rehearsal:
    """The records of the rehearsed ranks, and their faults."""

    config: Config
    world: int
    layers: int | None
    """Layers of each stage that ran; None: all."""
    records: dict[int, RankRecord]
    """Rank to its record."""
    counts: Counts
    faults: list[Fault]


def rehearse(
    config: Config, world: int, *, ranks: Sequence[int] = (), layers: int | None = 2
) -> Rehearsal:
    """Rehearse a configuration, in as many processes at a time as there are cores.

    Args:
        config: derived and validated for `world` ranks.
        ranks: more ranks to rehearse, besides those that represent all others.
        layers: number of layers of each pipeline stage to run; None: all.
    """
    degrees = axis_degrees(config.parallelism)
    sample = RankSample({*corners(degrees), *ranks}, degrees)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan.tools.rehearsal.rank"])
    forkserver.ensure_running()
    processes = min(_cores(), len(sample.ranks))
    with ProcessPoolExecutor(
        processes, context, initializer=end_with_starter, max_tasks_per_child=1
    ) as pool:

        def run(rank: int, values: int, broadcasts: list[Any] | None) -> Future[RankRecord]:
            return pool.submit(
                _in_new_process,
                config,
                world,
                rank,
                layers=layers,
                values=values,
                broadcasts=broadcasts,
            )

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
    faults = []
    for fault in check(records, sample, counts):
        rank = fault.rank
        if rank in records and fault.kind in _MAY_DEPEND_ON_DATA:
            fault = _explain(fault, records[rank], sample.values(rank), again)
        faults.append(fault)
    return counts, faults


def few_layers(config: Config) -> int:
    """Number of layers of each stage that suffices to see all its communication.

    Without a pipeline, FSDP gathers a layer while another one computes, so there must be two. With
    a pipeline, the schedule gathers whole stages.
    """
    return 1 if config.parallelism.pipeline_parallel_degree > 1 else 2


def check(records: dict[int, RankRecord], sample: RankSample, counts: Counts) -> list[Fault]:
    """Faults of the first check that finds any; later checks assume that earlier ones passed."""
    faults = [*errors(records), *check_groups(records)]
    if faults:
        return faults
    faults = check_collectives(records, sample, counts)
    faults += check_messages(records, sample, counts)
    faults += check_exchanges(records, counts)
    return faults or check_circles(records)


def _explain(
    fault: Fault, before: RankRecord, values: int, again: Callable[[int, int], RankRecord]
) -> Fault:
    """The fault, attributed to the rank's own data if it acts differently with other values."""
    for other in range(len(VALUES)):
        if other != values:
            after = again(fault.rank, other)
            if _actions(before) != _actions(after):
                return _because_of_data(fault, before, after)
    return fault


def _actions(record: RankRecord) -> tuple[Any, ...]:
    return record.creations, record.error, record.events


def _because_of_data(fault: Fault, before: RankRecord, after: RankRecord) -> Fault:
    """The fault, attributed to the rank's own data if it read any before its events differ."""
    pairs = enumerate(zip_longest(before.events, after.events))
    first = next((i for i, (earlier, later) in pairs if earlier != later), len(before.events))
    read = [line for position, line in before.local_reads if position <= first]
    if not read:
        return fault
    where = f"rank {fault.rank} depends on a value of its own data, which it reads at {read[-1]}"
    return Fault("data", fault.rank, f"{where}: {fault.text}")


def _cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_new_process(config: Config, *ranks: int, **options: Any) -> RankRecord:
    """`rehearse_rank` in a new process."""
    from torchtitan.tools.rehearsal.rank import rehearse_rank  # imports torch

    gc.freeze()  # the trainer's collection needn't scan torch's objects
    if config.experimental.custom_import:
        import_custom(config.experimental.custom_import)
    return rehearse_rank(config, *ranks, **options)
