"""The fastest legal layout: every degree, schedule, microbatch and checkpointing mode, by the closed forms.

The model, the row length, the global batch and what computes (types, compilation, Float8) stay as the configuration has
them: a search changes speed and memory, never what is trained.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.config.derive import DEGREE_KEYS, replace
from torchtitan.config.schema import Config
from torchtitan.config.support import compiles_blocks
from torchtitan.config.validate import validate
from torchtitan.distributed.stages import SCHEDULES, StagePlan, plan_stages
from torchtitan.models import ModelSpec
from torchtitan.plan.answers import Answer, answer
from torchtitan.plan.costs import step_time
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.memory import peak_memory
from torchtitan.plan.workload import Workload
from torchtitan.utils.errors import ConfigError

_CHECKPOINTING = ({"mode": "none"}, {"mode": "selective", "selective_ac_option": "op"}, {"mode": "full"})
"""From the fastest to the smallest: what follows one that fits is slower."""
_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
_MICROBATCHES = 64
"""At most so many: more hardly shrink the bubble."""


@dataclass(frozen=True)
class Found:
    """What a search saw."""

    best: list[Answer]
    """Those that fit, the fastest first; of layouts that differ in nothing but the batch's cut, the best."""
    points: list[tuple[float, float]]
    """(GiB, tokens/s per GPU) of everything legal."""
    seen: int
    """Configurations that were legal."""


def search(config: Config, spec: ModelSpec, args: object, world: int, hardware: Hardware) -> Found:
    """Look at every legal layout of `world` ranks."""
    fitting: dict[tuple[int, ...], tuple[float, Workload]] = {}
    points: list[tuple[float, float]] = []
    stages: dict[tuple[object, ...], StagePlan | None] = {}
    for layout in _layouts(config, spec, args, world, hardware.gpus_per_node):
        for batch in _batches(layout, world):
            workload = _fastest_that_fits(batch, spec, args, world, hardware, stages, points)
            if workload is None:
                continue
            speed = step_time(workload, hardware).tokens_per_second
            key = workload.pp, workload.replicate, workload.shard, workload.cp, workload.tp
            if key not in fitting or speed > fitting[key][0]:
                fitting[key] = speed, workload
    ranked = sorted(fitting.values(), key=lambda found: -found[0])
    return Found([answer(w, spec, hardware) for _, w in ranked[:20]], points, len(points))


def _divisors(n: int, limit: int) -> list[int]:
    return [d for d in range(1, min(n, limit) + 1) if n % d == 0]


def _layouts(config: Config, spec: ModelSpec, args: object, world: int, node: int) -> Iterator[Config]:
    """Degrees whose product is `world`. Tensor parallelism stays within a node; copies span whole nodes."""
    every = math.gcd(*spec.tensor_parallel_sizes(args).values())
    tied = bool(spec.tied_modules(args))
    for tp in (d for d in _divisors(world, node) if every % d == 0):
        for cp in _divisors(world // tp, 16):
            for pp in _divisors(world // tp // cp, 1 if tied else 16):
                rest = world // tp // cp // pp
                for replicate in _divisors(rest, rest):
                    if replicate > 1 and (rest // replicate * cp * tp) % node:
                        continue
                    degrees = {"pp": pp, "dp_replicate": replicate, "dp_shard": rest // replicate, "cp": cp, "tp": tp}
                    made = config
                    for axis, degree in degrees.items():
                        made = replace(made, f"parallelism.{DEGREE_KEYS[axis]}", degree)
                    overlap = tp > 1 and compiles_blocks(config) and config.compile.backend == "inductor"
                    yield replace(made, "parallelism.enable_async_tensor_parallel", overlap)


def _batches(config: Config, world: int) -> Iterator[Config]:
    """Ways to cut the global batch: rows at a time, and for a pipeline the size and order of its microbatches."""
    p, size = config.parallelism, "parallelism.pipeline_parallel_microbatch_size"
    rows, rest = divmod(config.training.global_batch_size, p.data_parallel_replicate_degree * p.data_parallel_shard_degree)
    if rest or not rows:
        return
    for local in _divisors(rows, rows):
        made = replace(config, "training.local_batch_size", local)
        if p.pipeline_parallel_degree == 1:
            yield made
            continue
        if local * 4 < rows:  # accumulation pays for a bubble each time
            continue
        for microbatch in _divisors(local, 4):
            if p.pipeline_parallel_degree <= local // microbatch <= _MICROBATCHES:
                for schedule in _SCHEDULES:
                    yield replace(replace(made, size, microbatch), "parallelism.pipeline_parallel_schedule", schedule)


def _fastest_that_fits(
    config: Config,
    spec: ModelSpec,
    args: object,
    world: int,
    hardware: Hardware,
    stages: dict[tuple[object, ...], StagePlan | None],
    points: list[tuple[float, float]],
) -> Workload | None:
    """The first checkpointing mode, and number of slices of the loss, with which a layout fits."""
    p = config.parallelism
    for checkpointing in _CHECKPOINTING:
        ac = config.activation_checkpoint.model_copy(update=checkpointing)
        made = config.model_copy(update={"activation_checkpoint": ac})
        schedule = SCHEDULES[p.pipeline_parallel_schedule].name
        microbatches = config.training.local_batch_size // p.pipeline_parallel_microbatch_size
        key = p.pipeline_parallel_degree, schedule, p.pipeline_parallel_microbatch_size, microbatches
        try:
            validate(made, world)
            if key not in stages:
                stages[key] = plan_stages(made, spec, args)
        except ConfigError:
            if key not in stages and p.pipeline_parallel_degree > 1:
                return None
            continue
        workload = Workload(made, args, stages[key])
        gib = peak_memory(workload).reserved / 2**30
        points.append((gib, step_time(workload, hardware).tokens_per_second))
        if gib <= hardware.usable_gib:
            return workload
    return None
