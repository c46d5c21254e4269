"""Rehearse the ranks of a configuration, each in its own process, and check them against each
other.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.config.derive import axis_degrees
from torchtitan.config.registry import import_custom
from torchtitan.config.sections.schema import Config
from torchtitan.tools.rehearsal.events import Record
from torchtitan.tools.rehearsal.mismatches import (
    Counts,
    Fault,
    check_collectives,
    check_exchanges,
    check_groups,
    check_messages,
    errors,
)
from torchtitan.tools.rehearsal.rank_sample import Cast, corners
from torchtitan.tools.rehearsal.waits import check_circles

_EVERY_RANK_BELOW = 64
"""Number of ranks. Each takes seconds of CPU time."""


@dataclass(frozen=True)
class Rehearsal:
    """What was rehearsed, and what is wrong."""

    config: Config
    world: int
    layers: int | None
    """Of each stage that ran; None: all."""
    records: dict[int, Record]
    """By rank."""
    counts: Counts
    faults: list[Fault]


def rehearse(
    config: Config,
    world: int,
    *,
    ranks: Sequence[int] = (),
    layers: int | None = 2,
) -> Rehearsal:
    """Rehearse a configuration, in as many processes at a time as there are cores.

    Args:
        config: derived and validated for `world` ranks.
        ranks: to rehearse besides those that stand for all others.
        layers: of each pipeline stage to run; None: all.
    """
    degrees = axis_degrees(config.parallelism)
    cast = Cast(sorted({*corners(degrees), *ranks}), degrees)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan.tools.rehearsal.rank"])
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with ProcessPoolExecutor(
        min(cores, len(cast.rehearsed)), mp_context=context, max_tasks_per_child=1
    ) as pool:

        def run(rank: int, large: bool, told: list[Any] | None) -> Any:
            return pool.submit(_alone, config, world, rank, layers, large, told)

        first = run(0, cast.large(0), None).result()
        others = sorted(cast.rehearsed - {0})
        running = {rank: run(rank, cast.large(rank), first.broadcasts) for rank in others}
        records = {0: first, **{rank: future.result() for rank, future in running.items()}}
        counts = Counts()
        faults = check(records, cast, counts)
        again = partial(run, told=first.broadcasts)
        faults = [
            _because_of_data(
                fault, records, lambda rank: again(rank, not cast.large(rank)).result()
            )
            if fault.kind in ("collectives", "messages", "error", "groups")
            and fault.rank in records
            and fault.rank
            else fault
            for fault in faults
        ]
    return Rehearsal(config, world, layers, records, counts, faults)


def few_ranks(world: int) -> bool:
    """Whether all ranks are rehearsed by default."""
    return world < _EVERY_RANK_BELOW


def few_layers(config: Config) -> int:
    """Layers of each stage that show all that a stage does.

    Without a pipeline, FSDP gathers a layer while another one computes, which takes two. With one,
    the schedule gathers whole stages.
    """
    return 1 if config.parallelism.pipeline_parallel_degree > 1 else 2


def check(records: dict[int, Record], cast: Cast, counts: Counts) -> list[Fault]:
    """The most certain explanations first. Later checks assume that earlier ones found nothing."""
    faults = [*errors(records), *check_groups(records)]
    if faults:
        return faults
    faults = check_collectives(records, cast, counts)
    faults += check_messages(records, cast, counts)
    faults += check_exchanges(records, counts)
    return faults or check_circles(records)


def _because_of_data(
    fault: Fault, records: dict[int, Record], again: Callable[[int], Record]
) -> Fault:
    """The fault, or that it is due to the rank's own data: if its tensors hold other values, it
    does something else.
    """
    before = records[fault.rank]
    after = again(fault.rank)
    same = (
        before.events == after.events
        and before.creations == after.creations
        and before.error == after.error
    )
    if same:
        return fault
    pairs = enumerate(zip(before.events, after.events, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(before.events), len(after.events)))
    read = [place for position, place in before.own_reads if position <= first]
    if not read:
        return fault
    text = (
        f"rank {fault.rank} depends on a value of its own data, which it reads at "
        f"{read[-1]}: {fault.text}"
    )
    return Fault("data", fault.rank, text)


def _alone(
    config: Config,
    world: int,
    rank: int,
    layers: int | None,
    large: bool,
    told: list[Any] | None,
) -> Record:
    from torchtitan.tools.rehearsal.rank import rehearse_rank  # imports torch

    if config.experimental.custom_import:
        import_custom(config.experimental.custom_import)
    return rehearse_rank(
        config,
        world,
        rank,
        layers=layers,
        large=large,
        told=told,
    )
