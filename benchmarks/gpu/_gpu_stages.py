"""The stages of `gpu.py`, in order of importance: what a first call can't reach is left for the
next. The MFU comes first, right after a stage that tells whether anything runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import _gpu_faults as faults
import _gpu_numerics as numerics
import _gpu_speed as speeds
import _gpu_two as two
from _gpu_bench import Bench, Figures
from _gpu_rates import rates


@dataclass(frozen=True)
class Stage:
    """One thing to find out."""

    name: str
    seconds: int
    """Time limit. What a stage takes is known only once it has run."""
    run: Callable[[Bench], Figures]
    flags: tuple[str, ...] = ()
    """Of a run whose speed and memory the planner predicts."""
    world: int = 1


def _speed(
    model: str,
    variant: str = "",
    *,
    seconds: int = 150,
    world: int = 1,
    gib: float = 0,
    steps: int = speeds.TIMED,
) -> Stage:
    name = f"{model}_{variant}" if variant else model
    run = partial(speeds.speed, model=model, variant=variant, world=world, gib=gib, steps=steps)
    flags = (*speeds.MODELS[model], *speeds.VARIANTS[variant])
    return Stage(name, seconds, run, flags, world)


def _two_speed(axis: str) -> Stage:
    run = partial(two.speed, axis=axis)
    return Stage(f"two_{axis}", 90, run, two.SPEEDS[axis], world=2)


_TABLE = [
    Stage("first_run", 60, partial(faults.first_run, compiled=False)),
    _speed("8b_layers", gib=75, seconds=210),
    _speed("8b_layers", "float8_tensorwise", gib=75),
    Stage("rates", 60, partial(rates, world=1)),
    Stage("groups", 60, faults.groups),
    Stage("first_run_compiled", 120, partial(faults.first_run, compiled=True)),
    Stage("losses", 120, numerics.losses),
    Stage("attention", 90, numerics.attention),
    Stage("float8", 90, numerics.float8),
    Stage("ring", 60, numerics.ring),
    Stage("norm", 60, numerics.norm),
    Stage("deterministic", 90, numerics.deterministic),
    _speed("8b_layers", "float8_rowwise", gib=75),
    _speed("8b_layers", "eager", gib=75),
    _speed("1b", gib=75),
    _speed("1b", "eager", gib=60),
    _speed("1b", "loss_chunks_8", gib=60),
    _speed("3b", gib=135),
    _speed("3b", "selective_op", gib=100),
    _speed("3b", "full", gib=75),
    _speed("3b", "float8_tensorwise", gib=135),
    _speed("3b", "float8_rowwise", gib=135),
    _speed("8b_of_8", world=8, gib=75, seconds=180),
    _speed("70b_of_64", world=64, gib=75, seconds=240, steps=10),
    _speed("8b_tp8", world=8, gib=75, seconds=180),
    _speed("moe_of_8", world=8, gib=75, seconds=180),
    Stage("update_adamw", 90, partial(speeds.update, optimizer="AdamW")),
    Stage("update_muon", 120, partial(speeds.update, optimizer="Muon")),
    Stage("saves_disabled", 90, partial(faults.saves, mode="disabled")),
    Stage("saves_async", 90, partial(faults.saves, mode="async")),
    Stage("saves_pinned", 90, partial(faults.saves, mode="async_with_pinned_mem")),
    Stage("large_saves", 180, partial(faults.large_saves, mode="async_with_pinned_mem")),
    Stage("out_of_memory", 90, faults.out_of_memory),
    Stage("stopped", 90, faults.stopped),
    Stage("two_start", 120, two.start),
    *(Stage(f"ranks_{axis}", 75, partial(faults.layout, axis=axis)) for axis in faults.LAYOUTS),
    Stage("ranks_watch", 60, faults.watch),
    Stage("two_saves", 100, two.saves),
    *(_two_speed(axis) for axis in two.SPEEDS),
]
STAGES = {stage.name: stage for stage in _TABLE}
