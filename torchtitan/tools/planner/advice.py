"""Small changes of a configuration, each priced by a plan: what would make a run faster, and what
would make it fit.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchtitan.config.derive import divisors, ranks_of, with_settings
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.tools.planner.layouts import SCHEDULES
from torchtitan.tools.planner.memory import GIB, predict_memory
from torchtitan.tools.planner.predict import Plan, derived_workload, replan
from torchtitan.tools.planner.workload import Workload
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import show_gib

Settings = dict[str, Any]
"""Values by their keys."""

COSTS = 3
"""Costs that a plan lists."""
CHANGES = 2
"""Changes listed for each."""
SAVINGS = 6
"""Changes listed for a run that doesn't fit."""
_FASTER = 1.005
"""Speed-up from which a change is suggested."""
_SMALLER = 0.98
"""Relative peak below which a change is suggested."""
_LOSS_CHUNKS = 8
_CHANGES_TRAINING = ("training.seq_len", "optimizer.state_dtype")
"""Keys that change what is trained: never suggested for speed, and last for memory."""

_MODE = "activation_checkpoint.mode"
_RECOMPUTE_NOTHING: Settings = {_MODE: "none"}
_COMPILE: Settings = {"compile.enable": True, "compile.components": ["model", "loss"]}
_ALWAYS: tuple[Settings, ...] = (
    _RECOMPUTE_NOTHING,
    {_MODE: "selective", "activation_checkpoint.selective_ac_option": "op"},
    {_MODE: "full"},
    {"activation_checkpoint.offload_blocks": 0},
    {"activation_checkpoint.offload_blocks": -1},
    _COMPILE,
    {"parallelism.fsdp_reduce_once_per_step": False},
    {"parallelism.fsdp_reshard_after_forward": "default"},
    {"parallelism.context_parallel_rotate_method": "alltoall"},
    {"training.enable_cpu_offload": True},
    {"optimizer.early_step_in_backward": True},
    {"optimizer.state_dtype": "bfloat16"},
    *({"parallelism.pipeline_parallel_schedule": schedule} for schedule in SCHEDULES),
)
"""Changes that don't depend on the configured values."""


def neighbours(w: Workload) -> Iterator[Settings]:
    """Changes of one aspect, legal or not, with and without an effect."""
    t = w.config.training
    yield from _ALWAYS
    tokens = t.seq_len // (w.cp * w.tp)
    yield {"training.loss_chunks": max(t.loss_chunks, divisors(tokens, _LOSS_CHUNKS)[-1])}
    half_rows = _half("training.local_batch_size", w.config)
    yield half_rows
    yield {
        "training.global_batch_size": 2 * t.global_batch_size,
        "training.local_batch_size": 2 * t.local_batch_size,
    }
    yield _half("training.seq_len", w.config)
    yield _half("parallelism.pipeline_parallel_microbatch_size", w.config)
    if w.config.model.converters in ([], ["float8"]):
        float8: Settings = {"model.converters": ["float8"]}
        yield float8
        yield float8 | {"quantize.linear.float8.recipe_name": "tensorwise"}
    twice = {"parallelism.data_parallel_shard_degree": 2 * w.dp_shard}
    yield twice
    yield twice | half_rows
    if w.tp > 1:
        yield _COMPILE | {"parallelism.enable_async_tensor_parallel": True}
        yield _half("parallelism.tensor_parallel_degree", w.config) | twice | half_rows
    if w.dp_replicate > 1:
        yield _half("parallelism.data_parallel_replicate_degree", w.config) | twice
    if w.experts:  # more ranks that share the experts gather less of them; fewer copy fewer rows
        yield {"parallelism.expert_parallel_degree": 2 * w.ep}
        yield _half("parallelism.expert_parallel_degree", w.config)


def _half(key: str, config: Config) -> Settings:
    return {key: max(1, attrgetter(key)(config) // 2)}


def show_settings(settings: Settings) -> str:
    """Settings as they are written in TOML."""
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def _neighbour_configs(w: Workload) -> Iterator[tuple[Settings, Config]]:
    """The neighbours that differ, with the configuration that each makes."""
    for settings in neighbours(w):
        config = with_settings(w.config, settings)
        if config != w.config:
            yield settings, config


def _trains_alike(settings: Settings) -> bool:
    return settings.keys().isdisjoint(_CHANGES_TRAINING)


# ---- speed


@dataclass(frozen=True)
class Change:
    """A legal change that makes training faster."""

    settings: Settings
    after: Plan
    gain: float
    """Relative gain in tokens per second."""
    cause: str
    """The cause of time that it shortens most, per token."""


def faster(plan: Plan) -> list[Change]:
    """Legal changes that fit and speed up training on the same ranks, the best first."""
    changes = []
    for settings, config in _neighbour_configs(plan.workload):
        if not _trains_alike(settings) or ranks_of(config) != plan.workload.world:
            continue
        after = replan(plan, config)
        if after is None or not after.fits:
            continue
        speedup = after.tokens_per_second / plan.tokens_per_second
        if speedup > _FASTER:
            changes.append(Change(settings, after, speedup - 1, cause=_most_shortened(plan, after)))
    return sorted(changes, key=lambda change: -change.gain)


def _most_shortened(before: Plan, after: Plan) -> str:
    """The cause on which most time per token is saved."""
    scale = before.workload.tokens_per_step / after.workload.tokens_per_step
    later = after.time.by_cause
    return max(
        before.time.by_cause,
        key=lambda cause: before.time.by_cause[cause] - scale * later.get(cause, 0.0),
    )


def largest_costs(plan: Plan) -> dict[str, list[Change]]:
    """The largest causes of the step's time, with the best changes that shorten each most."""
    changes = faster(plan)
    return {
        cause: [change for change in changes if change.cause == cause][:CHANGES]
        for cause in list(plan.time.by_cause)[:COSTS]
    }


# ---- memory


def wasteful(plan: Plan) -> Iterator[str]:
    """Settings that should save memory, but by the plan need more, and no less time: recomputation
    that keeps more than it drops, and chunks of a loss that are smaller than the gradient they add.
    """
    now = plan.tightest
    for settings in (_RECOMPUTE_NOTHING, _half("training.loss_chunks", now.config)):
        after = replan(now, with_settings(now.config, settings))
        if after is None or after.peak_gib >= _SMALLER * now.peak_gib:
            continue
        gain = after.tokens_per_second / now.tokens_per_second - 1
        if gain >= 0:
            yield (
                f"by this plan, {show_settings(settings)} takes less memory "
                f"({show_gib(after.peak_gib)} instead of {show_gib(now.peak_gib)}) and isn't "
                f"slower ({gain:+.1%})"
            )


@dataclass(frozen=True)
class Saving:
    """A legal change that lowers the peak."""

    settings: Settings
    ranks: int
    before: float
    """Peak of the pipeline rank that needs most, in GiB."""
    after: float

    def __str__(self) -> str:
        effect = f"{show_gib(self.after)} ({self.after - self.before:+.1f})"
        return f"{show_settings(self.settings)}: {effect}"


def smaller(config: Config, spec: ModelSpec, world: int) -> list[Saving]:
    """Changes that lower the predicted peak, largest saving first, changes of training last.

    Args:
        config: derived and validated for `world` ranks.
    """
    now = derived_workload(config, spec, world)
    before = predict_memory(now).reserved / GIB
    savings = []
    for settings, neighbour in _neighbour_configs(now):
        ranks = ranks_of(neighbour)
        try:
            after = predict_memory(derived_workload(neighbour, spec, ranks)).reserved / GIB
        except ConfigError:
            continue
        if after < _SMALLER * before:
            savings.append(Saving(settings, ranks, before, after))
    return sorted(savings, key=lambda saving: (not _trains_alike(saving.settings), saving.after))


def advice(config: Config, spec: ModelSpec, world: int) -> str:
    """The best of `smaller` under a heading, one a line; empty if there are none."""
    savings = smaller(config, spec, world)
    if not savings:
        return ""
    lines = [
        f"  {saving}{f' on {saving.ranks} ranks' if saving.ranks > world else ''}"
        for saving in savings[:SAVINGS]
    ]
    heading = f"What lowers the planned peak of {show_gib(savings[0].before)}:"
    return "\n".join([heading, *lines])
