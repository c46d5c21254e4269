"""The fastest legal layout: every degree, schedule, microbatch size and checkpointing mode, by the closed forms.

The model, the row length, the global batch and what computes (types, compilation, Float8) stay as configured: a search
changes speed and memory, never what is trained.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import DEGREE_KEYS, divisors, layout_degrees, replace
from torchtitan.config.schema import Config
from torchtitan.config.stages import PipelineStages, pipeline_stages
from torchtitan.config.support import compiles_blocks
from torchtitan.config.validate import validate
from torchtitan.models import ModelSpec
from torchtitan.plan.costs import step_time
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.memory import GIB, predict_memory
from torchtitan.plan.predict import Plan, predict
from torchtitan.plan.workload import Workload
from torchtitan.train.preflight import check_experts
from torchtitan.utils.errors import ConfigError

_CHECKPOINTING = ({"mode": "none"}, {"mode": "selective", "selective_ac_option": "op"}, {"mode": "full"})
"""From the fastest to the smallest: once one fits, the next is slower."""
_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
_MAX_DEGREE = 16
"""Of context and pipeline parallelism: the largest in the published measurements is 8."""
_MAX_MICROBATCH, _MAX_MICROBATCHES, _MAX_PIPELINE_ACCUMULATION = 4, 64, 4
"""Rows in a microbatch; microbatches, since more hardly shrink the bubble; and batches of a pipeline in a step, each
of which has a bubble of its own."""
_FILL = 0.95
"""Share of the usable memory that a proposal may take, as the closed forms are not exact."""
_ALIKE = 0.98
"""Relative speed from which two layouts count as equally fast: the model can't tell them apart."""
_SHOWN = 10


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: list[Plan]
    """The fastest plan of each layout that fits, in order; but first the simplest of those that are about as fast."""
    points: list[tuple[float, float]]
    """(GiB, tokens/s per GPU) of every plan that fits."""
    seen: int
    """Legal configurations."""


def search(config: Config, spec: ModelSpec, args: Any, world: int, hardware: Hardware) -> Found:
    """Try every legal layout of `world` ranks."""
    fastest: dict[tuple[int, ...], tuple[float, Workload]] = {}
    points: list[tuple[float, float]] = []
    seen = 0
    pipelines: dict[tuple[Any, ...], PipelineStages | None] = {}
    for layout in _layouts(config, spec, args, world, hardware.gpus_per_node):
        degrees = tuple(layout_degrees(layout.parallelism).values())
        for batch in _batches(layout):
            for w in _by_checkpointing(batch, spec, args, world, pipelines):
                seen += 1
                gib = predict_memory(w).reserved / GIB
                if gib > hardware.usable_gib * _FILL:
                    continue
                speed = step_time(w, hardware).tokens_per_second
                points.append((gib, speed))
                if degrees not in fastest or speed > fastest[degrees][0]:
                    fastest[degrees] = speed, w
                break  # the next mode recomputes more, and is slower
    ranked = sorted(fastest, key=lambda degrees: -fastest[degrees][0])
    if ranked:
        alike = [degrees for degrees in ranked if fastest[degrees][0] >= fastest[ranked[0]][0] * _ALIKE]
        simplest = min(alike, key=lambda degrees: sum(degree > 1 for degree in degrees))
        ranked = [simplest, *(degrees for degrees in ranked if degrees != simplest)]
    return Found([predict(fastest[degrees][1], spec, hardware) for degrees in ranked[:_SHOWN]], points, seen)


def _layouts(config: Config, spec: ModelSpec, args: Any, world: int, node: int) -> Iterator[Config]:
    """Every split of `world` ranks into degrees. Tensor parallelism stays within a node; replicas span whole nodes."""
    tp_multiple = math.gcd(*spec.tensor_parallel_sizes(args).values())
    max_pp = 1 if spec.tied_modules(args) else _MAX_DEGREE
    sizes = spec.expert_sizes(args)
    experts = next(iter(sizes.values()), 0)
    for tp in (d for d in divisors(world, node) if tp_multiple % d == 0):
        for cp in divisors(world // tp, _MAX_DEGREE):
            for pp in divisors(world // tp // cp, max_pp):
                ranks = world // tp // cp // pp
                for replicate in divisors(ranks):
                    shard = ranks // replicate
                    if replicate > 1 and (shard * cp * tp) % node:
                        continue
                    degrees = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
                    layout = config
                    for axis, degree in degrees.items():
                        layout = replace(layout, f"parallelism.{DEGREE_KEYS[axis]}", degree)
                    async_tp = tp > 1 and compiles_blocks(config) and config.compile.backend == "inductor"
                    layout = replace(layout, "parallelism.enable_async_tensor_parallel", async_tp)
                    for ep in divisors(math.gcd(experts, shard * cp * tp)) if experts else [1]:
                        split = replace(layout, "parallelism.expert_parallel_degree", ep)
                        if not list(check_experts(split, sizes)):
                            yield split


def _batches(config: Config) -> Iterator[Config]:
    """Ways to cut the global batch: rows at a time, and in a pipeline the size and order of its microbatches."""
    p = config.parallelism
    ranks = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    rows, rest = divmod(config.training.global_batch_size, ranks)
    if rest or not rows:
        return
    for local in divisors(rows):
        batch = replace(config, "training.local_batch_size", local)
        if p.pipeline_parallel_degree == 1:
            yield batch
        elif rows // local <= _MAX_PIPELINE_ACCUMULATION:
            for size in divisors(local, _MAX_MICROBATCH):
                if p.pipeline_parallel_degree <= local // size <= _MAX_MICROBATCHES:
                    sized = replace(batch, "parallelism.pipeline_parallel_microbatch_size", size)
                    for schedule in _SCHEDULES:
                        yield replace(sized, "parallelism.pipeline_parallel_schedule", schedule)


def _by_checkpointing(
    config: Config, spec: ModelSpec, args: Any, world: int, pipelines: dict[tuple[Any, ...], PipelineStages | None]
) -> Iterator[Workload]:
    """The legal workloads of a layout and batch, from the one that recomputes least to the one that keeps least.

    Args:
        pipelines: those built so far, to which this adds.
    """
    p = config.parallelism
    microbatches = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
    key = p.pipeline_parallel_degree, p.pipeline_parallel_schedule, p.pipeline_parallel_microbatch_size, microbatches
    for mode in _CHECKPOINTING:
        ac = config.activation_checkpoint.model_copy(update=mode)
        legal = config.model_copy(update={"activation_checkpoint": ac})
        try:
            validate(legal, world)
            if key not in pipelines:
                flops = spec.module_flops(args, legal.training.seq_len)
                pipelines[key] = pipeline_stages(legal, flops, spec.tied_modules(args))
        except ConfigError:
            continue
        yield Workload(legal, args, pipelines[key])
