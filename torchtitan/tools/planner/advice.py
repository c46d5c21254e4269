"""Small changes of a configuration, each priced by a plan: what would make a run faster, and what
would make it fit.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.config.derive import divisors
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.tools.planner.layouts import SCHEDULES
from torchtitan.tools.planner.memory import GIB, predict_memory
from torchtitan.tools.planner.predict import Plan, derived_workload, ranks_of, replan
from torchtitan.tools.planner.settings import Settings, apply_settings, read
from torchtitan.tools.planner.workload import Workload
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import show_gib

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
RECOMPUTE_NOTHING: Settings = {_MODE: "none"}
RECOMPUTE_OPERATIONS: Settings = {
    _MODE: "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
_COMPILE: Settings = {"compile.enable": True, "compile.components": ["model", "loss"]}
_ALWAYS: tuple[tuple[str, Settings], ...] = (
    ("keep attention and every second product", RECOMPUTE_OPERATIONS),
    ("recompute nothing", RECOMPUTE_NOTHING),
    ("recompute everything", {_MODE: "full"}),
    ("offload nothing", {"activation_checkpoint.offload_blocks": 0}),
    ("offload activations", {"activation_checkpoint.offload_blocks": -1}),
    ("compile", _COMPILE),
    ("reduce every batch", {"parallelism.fsdp_reduce_once_per_step": False}),
    ("free gathered weights", {"parallelism.fsdp_reshard_after_forward": "default"}),
    ("state on the host", {"training.enable_cpu_offload": True}),
    ("update in the backward", {"optimizer.early_step_in_backward": True}),
    ("the optimizer's state in bf16", {"optimizer.state_dtype": "bfloat16"}),
)
"""Changes that don't depend on the configured values."""


def neighbours(w: Workload) -> Iterator[tuple[str, Settings]]:
    """Changes of one aspect, legal or not: its name and the keys to set."""
    yield from _ALWAYS
    yield from _rows(w.config)
    yield from _precision(w.config)
    yield from _pipeline(w.config)
    yield from _layouts(w)


def _rows(config: Config) -> Iterator[tuple[str, Settings]]:
    p = config.parallelism
    t = config.training
    tokens = t.seq_len // (p.context_parallel_degree * p.tensor_parallel_degree)
    if more := [n for n in divisors(tokens, _LOSS_CHUNKS) if n > t.loss_chunks]:
        yield "the loss in chunks", {"training.loss_chunks": more[-1]}
    yield "half the rows at a time", _half("training.local_batch_size", config)
    yield (
        "double the batch",
        {
            "training.global_batch_size": 2 * t.global_batch_size,
            "training.local_batch_size": 2 * t.local_batch_size,
        },
    )
    yield "half the row length", _half("training.seq_len", config)


def _half(key: str, config: Config) -> Settings:
    return {key: max(1, read(config, key) // 2)}


def _precision(config: Config) -> Iterator[tuple[str, Settings]]:
    float8 = {"model.converters": ["float8"]}
    recipe = "quantize.linear.float8.recipe_name"
    if not config.model.converters:
        yield "Float8", float8
    if config.model.converters in ([], ["float8"]):
        yield "tensorwise Float8", float8 | {recipe: "tensorwise"}


def _pipeline(config: Config) -> Iterator[tuple[str, Settings]]:
    p = config.parallelism
    if p.pipeline_parallel_degree == 1:
        return
    yield "smaller microbatches", _half("parallelism.pipeline_parallel_microbatch_size", config)
    if not p.pipeline_parallel_schedule_csv:
        for schedule in SCHEDULES:
            yield f"schedule {schedule}", {"parallelism.pipeline_parallel_schedule": schedule}


def _layouts(w: Workload) -> Iterator[tuple[str, Settings]]:
    config = w.config
    half_rows = _half("training.local_batch_size", config)
    twice = {"parallelism.data_parallel_shard_degree": 2 * w.dp_shard}
    if w.tp > 1:
        settings = _COMPILE | {"parallelism.enable_async_tensor_parallel": True}
        yield "asynchronous TP", settings
    if w.tp % 2 == 0:
        half = _half("parallelism.tensor_parallel_degree", config)
        yield "half the TP, twice the shards", half | twice | half_rows
    if w.cp > 1:
        ring = {"parallelism.context_parallel_rotate_method": "alltoall"}
        yield "send keys around a ring", ring
    if w.experts:  # more ranks that share the experts gather less of them; fewer copy fewer rows
        ep = "parallelism.expert_parallel_degree"
        yield "twice the expert parallelism", {ep: 2 * w.ep}
        yield "half the expert parallelism", _half(ep, config)
    if w.dp_replicate % 2 == 0:
        half = _half("parallelism.data_parallel_replicate_degree", config)
        yield "shards in place of replicas", half | twice
    if w.accumulation % 2 == 0:
        yield "twice the ranks", twice
    elif config.training.local_batch_size % 2 == 0:
        yield "twice the ranks", twice | half_rows


def show_settings(settings: Settings) -> str:
    """Settings as they are written in TOML."""
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def _neighbour_configs(w: Workload) -> Iterator[tuple[str, Settings, Config]]:
    """The neighbours that differ, with the configuration that each makes."""
    for text, settings in neighbours(w):
        config = apply_settings(w.config, settings)
        if config != w.config:
            yield text, settings, config


def _trains_alike(settings: Settings) -> bool:
    return settings.keys().isdisjoint(_CHANGES_TRAINING)


# ---- speed


@dataclass(frozen=True)
class Change:
    """A legal change that makes training faster."""

    text: str
    settings: Settings
    after: Plan
    gain: float
    """Relative gain in tokens per second."""
    cause: str
    """The cause of time that it shortens most, per token."""


@dataclass(frozen=True)
class Cost:
    """One cause of the step's time."""

    cause: str
    share: float
    changes: list[Change]


def largest_costs(plan: Plan) -> list[Cost]:
    """The largest causes of the step's time, with the best changes that shorten each most."""
    speedups = faster(plan)
    return [
        Cost(
            cause,
            seconds / plan.time.seconds,
            [change for change in speedups if change.cause == cause][:CHANGES],
        )
        for cause, seconds in list(plan.time.by_cause.items())[:COSTS]
    ]


def faster(plan: Plan) -> list[Change]:
    """Legal changes that speed up training on the same ranks, the best first, misfits last."""
    changes = []
    for text, settings, config in _neighbour_configs(plan.workload):
        if not _trains_alike(settings) or ranks_of(config) != plan.workload.world:
            continue
        if (after := replan(plan, config)) is None:
            continue
        speedup = after.tokens_per_second / plan.tokens_per_second
        if speedup > _FASTER:
            changes.append(
                Change(text, settings, after, speedup - 1, cause=_most_shortened(plan, after))
            )
    return sorted(changes, key=lambda change: (not change.after.fits, -change.gain))


def _most_shortened(before: Plan, after: Plan) -> str:
    """The cause on which most time per token is saved."""
    scale = before.workload.tokens_per_step / after.workload.tokens_per_step
    later = after.time.by_cause
    return max(
        before.time.by_cause,
        key=lambda cause: before.time.by_cause[cause] - scale * later.get(cause, 0.0),
    )


# ---- memory


def wasteful(plan: Plan) -> Iterator[str]:
    """Settings that should save memory, but by the plan need more, and no less time: recomputation
    that keeps more than it drops, and chunks of a loss that are smaller than the gradient they add.
    """
    now = plan.tightest
    for settings in (RECOMPUTE_NOTHING, _half("training.loss_chunks", now.config)):
        after = replan(now, apply_settings(now.config, settings))
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
    for _, settings, neighbour in _neighbour_configs(now):
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
