"""Every layout of a number of ranks, and the configuration that a search starts from."""

import math
from collections.abc import Iterator
from typing import Any

from torchtitan.config.derive import DEGREE_KEYS, compiles_blocks, divisors
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec

PIPELINE_KEYS = (
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "module_fqns_per_model_part",
)
"""Keys of `[parallelism]` that are for one number of stages."""
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""Schedules to try."""


def any_layout(config: Config, world: int) -> Config:
    """A configuration that a search on `world` ranks starts from: no layout, valid on one rank.

    The global batch, if the configuration doesn't set it, has as many rows as its own layout gives
    it: per rank as many as there, unless it sets the degree of FSDP.
    """
    p = config.parallelism
    t = config.training
    rows = t.global_batch_size
    if rows == -1:
        others = p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree
        shards = p.data_parallel_shard_degree
        ranks = world / others if shards == -1 else shards * p.data_parallel_replicate_degree
        rows = max(1, round(t.local_batch_size * ranks))
    fresh = Parallelism()
    reset = {
        key: getattr(fresh, key)
        for key in (*DEGREE_KEYS.values(), "expert_parallel_degree", *PIPELINE_KEYS)
    }
    reset |= {"data_parallel_shard_degree": 1, "enable_async_tensor_parallel": False}
    batch = {"global_batch_size": rows, "local_batch_size": rows}
    return config.model_copy(
        update={"parallelism": p.model_copy(update=reset), "training": t.model_copy(update=batch)}
    )


def layouts(config: Config, spec: ModelSpec, args: Any, world: int) -> Iterator[Config]:
    """Every split of `world` ranks into degrees, legal or not: first those without a pipeline, with
    few ranks for tensor and context parallelism.
    """
    tp_multiple = math.gcd(*spec.tensor_parallel_sizes(args).values())
    experts = next(iter(spec.expert_sizes(args).values()), 1)
    async_tp = compiles_blocks(config) and config.compile.backend == "inductor"
    for pp in divisors(world, 1 if spec.tied_modules(args) else None):
        for tp in divisors(math.gcd(world // pp, tp_multiple)):
            for cp in divisors(world // pp // tp):
                ranks = world // pp // tp // cp
                for replicate in divisors(ranks):
                    shards = ranks // replicate
                    degrees = {
                        "pipeline_parallel_degree": pp,
                        "data_parallel_replicate_degree": replicate,
                        "data_parallel_shard_degree": shards,
                        "context_parallel_degree": cp,
                        "tensor_parallel_degree": tp,
                        "enable_async_tensor_parallel": tp > 1 and async_tp,
                    }
                    for ep in divisors(math.gcd(experts, shards * cp * tp)):
                        degrees["expert_parallel_degree"] = ep
                        p = config.parallelism.model_copy(update=degrees)
                        yield config.model_copy(update={"parallelism": p})


def orders(ranks: int, layers: int) -> list[dict[str, Any]]:
    """Schedules of a pipeline and numbers of layers per stage, as keys of `[parallelism]`; without
    a pipeline, one that sets none.

    Stages are balanced by FLOPs, one or two per rank as the schedule needs, or interleaved deeper
    with the same number of layers each, where embedding and output both count as a layer or as
    none.
    """
    if ranks == 1:
        return [{}]
    schedules: list[dict[str, Any]] = [{"pipeline_parallel_schedule": name} for name in SCHEDULES]
    for size in range(1, (layers + 2) // (3 * ranks) + 1):
        for ends in (1, 0):
            stages = math.ceil((layers + 2 * ends) / size)
            if stages % ranks == 0 and stages >= 3 * ranks:
                deep = {
                    "pipeline_parallel_schedule": "Interleaved1F1B",
                    "pipeline_parallel_layers_per_stage": size,
                    "pipeline_parallel_first_stage_less_layers": ends,
                    "pipeline_parallel_last_stage_less_layers": ends,
                }
                schedules.append(deep)
    return schedules
