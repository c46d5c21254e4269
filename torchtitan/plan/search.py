"""The fastest legal layout: every degree, schedule, microbatch and checkpointing mode, by the closed forms.

The model, the row length, the global batch and what computes (types, compilation, Float8) stay as the configuration has
them: a search changes speed and memory, never what is trained.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import DEGREE_KEYS, divisors, replace
from torchtitan.config.schema import Config
from torchtitan.config.stages import PipelineStages, pipeline_stages
from torchtitan.config.support import compiles_blocks
from torchtitan.config.validate import validate
from torchtitan.models import ModelSpec
from torchtitan.plan.answers import GIB, Answer, answer, checkpointing
from torchtitan.plan.costs import step_time
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.memory import predict_memory
from torchtitan.plan.workload import Workload
from torchtitan.utils.errors import ConfigError

_CHECKPOINTING = ({"mode": "none"}, {"mode": "selective", "selective_ac_option": "op"}, {"mode": "full"})
"""From the fastest to the smallest: what follows one that fits is slower."""
_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
_SHOWN = 10
_MARGIN = 0.95
"""Share of the usable memory that a proposal may fill: the closed forms are not exact."""
_ALIKE = 0.98
"""Layouts whose speeds differ by less than the model can tell."""
_MICROBATCHES = 64
"""At most so many: more hardly shrink the bubble."""


@dataclass(frozen=True)
class Found:
    """What a search saw."""

    best: list[Answer]
    """The fastest of each layout that fits, in order; but first the simplest of those that are about as fast."""
    points: list[tuple[float, float]]
    """(GiB, tokens/s per GPU) of all that fit."""
    seen: int
    """Legal configurations."""

    def summary(self) -> dict[str, Any]:
        """As JSON."""
        return {"seen": self.seen, "points": self.points, "best": [_entry(found) for found in self.best]}


def search(config: Config, spec: ModelSpec, args: Any, world: int, hardware: Hardware) -> Found:
    """Look at every legal layout of `world` ranks."""
    fastest: dict[tuple[int, ...], tuple[float, Workload]] = {}
    points: list[tuple[float, float]] = []
    seen = 0
    plans: dict[tuple[Any, ...], PipelineStages | None] = {}
    for layout in _layouts(config, spec, args, world, hardware.gpus_per_node):
        for batch in _batches(layout):
            for w in _by_checkpointing(batch, spec, args, world, plans):
                seen += 1
                gib = predict_memory(w).reserved / GIB
                if gib > hardware.usable_gib * _MARGIN:
                    continue
                speed = step_time(w, hardware).tokens_per_second
                points.append((gib, speed))
                key = _degrees(w)
                if key not in fastest or speed > fastest[key][0]:
                    fastest[key] = speed, w
                break  # what recomputes more is slower
    ranked = sorted(fastest.values(), key=lambda found: -found[0])
    if ranked:
        alike = [found for found in ranked if found[0] >= ranked[0][0] * _ALIKE]
        simplest = min(alike, key=lambda found: sum(degree > 1 for degree in _degrees(found[1])))
        ranked = [simplest, *(found for found in ranked if found is not simplest)]
    return Found([answer(w, spec, hardware) for _, w in ranked[:_SHOWN]], points, seen)


def _entry(found: Answer) -> dict[str, Any]:
    w, p = found.workload, found.config.parallelism
    return {
        "layout": found.layout,
        "local_batch_size": found.config.training.local_batch_size,
        "accumulation": w.accumulation,
        "microbatches": w.microbatches,
        "schedule": p.pipeline_parallel_schedule if w.pipeline else None,
        "activation_checkpointing": checkpointing(found.config),
        "tokens_per_second_per_gpu": found.time.tokens_per_second,
        "peak_gib": found.peak_gib,
    }


def _degrees(w: Workload) -> tuple[int, ...]:
    return w.pp, w.replicate, w.shard, w.cp, w.tp


def _layouts(config: Config, spec: ModelSpec, args: Any, world: int, node: int) -> Iterator[Config]:
    """Degrees whose product is `world`. Tensor parallelism stays within a node; copies span whole nodes."""
    every = math.gcd(*spec.tensor_parallel_sizes(args).values())
    tied = bool(spec.tied_modules(args))
    for tp in (d for d in divisors(world, node) if every % d == 0):
        for cp in divisors(world // tp, 16):
            for pp in divisors(world // tp // cp, 1 if tied else 16):
                rest = world // tp // cp // pp
                for replicate in divisors(rest, rest):
                    if replicate > 1 and (rest // replicate * cp * tp) % node:
                        continue
                    degrees = {"pp": pp, "dp_replicate": replicate, "dp_shard": rest // replicate, "cp": cp, "tp": tp}
                    made = config
                    for axis, degree in degrees.items():
                        made = replace(made, f"parallelism.{DEGREE_KEYS[axis]}", degree)
                    overlap = tp > 1 and compiles_blocks(config) and config.compile.backend == "inductor"
                    yield replace(made, "parallelism.enable_async_tensor_parallel", overlap)


def _batches(config: Config) -> Iterator[Config]:
    """Ways to cut the global batch: rows at a time, and for a pipeline the size and order of its microbatches."""
    p, key = config.parallelism, "parallelism.pipeline_parallel"
    ranks = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    rows, rest = divmod(config.training.global_batch_size, ranks)
    if rest or not rows:
        return
    for local in divisors(rows, rows):
        made = replace(config, "training.local_batch_size", local)
        if p.pipeline_parallel_degree == 1:
            yield made
        elif 4 * local >= rows:  # each accumulation step has a bubble of its own
            for size in divisors(local, 4):
                if p.pipeline_parallel_degree <= local // size <= _MICROBATCHES:
                    for schedule in _SCHEDULES:
                        yield replace(replace(made, f"{key}_microbatch_size", size), f"{key}_schedule", schedule)


def _by_checkpointing(
    config: Config, spec: ModelSpec, args: Any, world: int, plans: dict[tuple[Any, ...], PipelineStages | None]
) -> Iterator[Workload]:
    """The legal workloads of a layout, from the one that recomputes least to the one that keeps least.

    Args:
        plans: pipelines that were already cut.
    """
    p = config.parallelism
    microbatches = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
    key = p.pipeline_parallel_degree, p.pipeline_parallel_schedule, p.pipeline_parallel_microbatch_size, microbatches
    for mode in _CHECKPOINTING:
        ac = config.activation_checkpoint.model_copy(update=mode)
        made = config.model_copy(update={"activation_checkpoint": ac})
        try:
            validate(made, world)
            if key not in plans:
                plans[key] = pipeline_stages(
                    made, spec.module_flops(args, made.training.seq_len), spec.tied_modules(args)
                )
        except ConfigError:
            continue
        yield Workload(made, args, plans[key])
