"""Small changes of a configuration, each priced by a plan: what would make a run faster, and what
would make it fit.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.config.derive import divisors
from torchtitan.config.rules import Facts, check
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.tools.planner.axes import Settings, applied
from torchtitan.tools.planner.layouts import SCHEDULES
from torchtitan.tools.planner.memory import GIB, predict_memory
from torchtitan.tools.planner.predict import Plan, derived_workload, predict
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
_COMPILE: Settings = {"compile.enable": True, "compile.components": ["model", "loss"]}


def neighbours(w: Workload) -> Iterator[tuple[str, Settings, int]]:
    """Changes of one aspect, legal or not: its name, the keys to set, and the ranks it needs."""
    config = w.config
    world = w.world
    p = config.parallelism
    t = config.training
    for text, settings in (*_recomputation(config), *_precision(config), *_pipeline(config)):
        yield text, settings, world
    yield "compile", _COMPILE, world
    tokens = t.seq_len // (p.context_parallel_degree * p.tensor_parallel_degree)
    if more := [n for n in divisors(tokens, _LOSS_CHUNKS) if n > t.loss_chunks]:
        yield "the loss in chunks", {"training.loss_chunks": more[-1]}, world
    half = {"training.local_batch_size": max(1, t.local_batch_size // 2)}
    yield "half the rows at a time", half, world
    yield (
        "double the batch",
        {
            "training.global_batch_size": 2 * t.global_batch_size,
            "training.local_batch_size": 2 * t.local_batch_size,
        },
        world,
    )
    yield "reduce every batch", {"parallelism.fsdp_reduce_once_per_step": False}, world
    yield "free gathered weights", {"parallelism.fsdp_reshard_after_forward": "default"}, world
    yield from _layouts(w)
    yield "state on the host", {"training.enable_cpu_offload": True}, world
    yield "update in the backward", {"optimizer.early_step_in_backward": True}, world
    yield "the optimizer's state in bf16", {"optimizer.state_dtype": "bfloat16"}, world
    yield "half the row length", {"training.seq_len": max(1, t.seq_len // 2)}, world


def _recomputation(config: Config) -> Iterator[tuple[str, Settings]]:
    operations = {_MODE: "selective", "activation_checkpoint.selective_ac_option": "op"}
    yield "keep attention and every second product", operations
    yield "recompute nothing", {_MODE: "none"}
    yield "recompute everything", {_MODE: "full"}
    for text, blocks in (("offload nothing", 0), ("offload activations", -1)):
        yield text, {"activation_checkpoint.offload_blocks": blocks}


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
    size = max(1, p.pipeline_parallel_microbatch_size // 2)
    yield "smaller microbatches", {"parallelism.pipeline_parallel_microbatch_size": size}
    if not p.pipeline_parallel_schedule_csv:
        for schedule in SCHEDULES:
            yield f"schedule {schedule}", {"parallelism.pipeline_parallel_schedule": schedule}


def _layouts(w: Workload) -> Iterator[tuple[str, Settings, int]]:
    p = w.config.parallelism
    world = w.world
    rows = w.config.training.local_batch_size
    half_rows = {"training.local_batch_size": max(1, rows // 2)}
    twice = {"parallelism.data_parallel_shard_degree": 2 * p.data_parallel_shard_degree}
    if p.tensor_parallel_degree > 1:
        settings = _COMPILE | {"parallelism.enable_async_tensor_parallel": True}
        yield "asynchronous TP", settings, world
        half = {"parallelism.tensor_parallel_degree": p.tensor_parallel_degree // 2}
        yield "half the TP, twice the shards", half | twice | half_rows, world
    if p.context_parallel_degree > 1:
        ring = {"parallelism.context_parallel_rotate_method": "alltoall"}
        yield "send keys around a ring", ring, world
    if w.experts:  # more ranks that share the experts gather less of them; fewer copy fewer rows
        ep = "parallelism.expert_parallel_degree"
        yield "twice the expert parallelism", {ep: 2 * w.ep}, world
        yield "half the expert parallelism", {ep: max(1, w.ep // 2)}, world
    if p.data_parallel_replicate_degree % 2 == 0:
        half = {"parallelism.data_parallel_replicate_degree": p.data_parallel_replicate_degree // 2}
        yield "shards in place of replicas", half | twice, world
    if w.accumulation % 2 == 0:
        yield "twice the ranks", twice, 2 * world
    elif rows % 2 == 0:
        yield "twice the ranks", twice | half_rows, 2 * world


def show_settings(settings: Settings) -> str:
    """Settings as they are written in TOML."""
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def _changing(w: Workload) -> Iterator[tuple[str, Settings, int, Config]]:
    """The neighbours that differ, with the configuration that each makes."""
    for text, settings, ranks in neighbours(w):
        changed = applied(w.config, settings)
        if changed != w.config:
            yield text, settings, ranks, changed


# ---- speed


@dataclass(frozen=True)
class Change:
    """A legal change that makes training faster."""

    text: str
    settings: Settings
    after: Plan
    gain: float
    """Relative gain in tokens per second."""
    part: str
    """The part of the step that it shortens most, per token."""


@dataclass(frozen=True)
class Cost:
    """A part of the step's time."""

    part: str
    share: float
    changes: list[Change]


def largest_costs(plan: Plan) -> list[Cost]:
    """The largest parts of the step, with the best changes that shorten each most."""
    speedups = faster(plan)
    return [
        Cost(
            part,
            seconds / plan.time.seconds,
            [change for change in speedups if change.part == part][:CHANGES],
        )
        for part, seconds in list(plan.time.parts.items())[:COSTS]
    ]


def faster(plan: Plan) -> list[Change]:
    """Legal changes that speed up training on the same ranks, the best first, misfits last."""
    world = plan.workload.world
    changes = []
    for text, settings, ranks, config in _changing(plan.workload):
        if ranks != world or not settings.keys().isdisjoint(_CHANGES_TRAINING):
            continue
        try:
            check(config, Facts(device=plan.hardware.accelerator))
            after = predict(derived_workload(config, plan.spec, ranks), plan.spec, plan.hardware)
        except ConfigError:
            continue
        speedup = after.tokens_per_second / plan.tokens_per_second
        if speedup > _FASTER:
            changes.append(Change(text, settings, after, speedup - 1, part=_shortened(plan, after)))
    return sorted(changes, key=lambda change: (not change.after.fits, -change.gain))


def _shortened(before: Plan, after: Plan) -> str:
    """The part of the step on which most time per token is saved."""
    scale = before.workload.tokens_per_step / after.workload.tokens_per_step
    later = after.time.parts
    return max(
        before.time.parts, key=lambda part: before.time.parts[part] - scale * later.get(part, 0.0)
    )


# ---- memory


def wasteful(plan: Plan) -> Iterator[str]:
    """Settings that should save memory, but by the plan take more, and no less time: recomputation
    that keeps more than it drops, and chunks of a loss that are smaller than the gradient they add.
    """
    w = plan.workload
    chunks = w.config.training.loss_chunks
    leaner: list[Settings] = []
    if plan.checkpointing != "none":
        leaner.append({_MODE: "none"})
    if chunks > 1:
        leaner.append({"training.loss_chunks": chunks // 2})
    for settings in leaner:
        try:
            other = derived_workload(applied(w.config, settings), plan.spec, w.world)
        except ConfigError:
            continue
        after = predict(other, plan.spec, plan.hardware)
        gain = after.tokens_per_second / plan.tokens_per_second - 1
        if after.peak_gib < _SMALLER * plan.peak_gib and gain >= 0:
            yield (
                f"by this plan, {show_settings(settings)} takes less memory "
                f"({show_gib(after.peak_gib)} instead of {show_gib(plan.peak_gib)}) and isn't "
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
    for _, settings, ranks, changed in _changing(now):
        try:
            after = predict_memory(derived_workload(changed, spec, ranks)).reserved / GIB
        except ConfigError:
            continue
        if after < _SMALLER * before:
            savings.append(Saving(settings, ranks, before, after))
    return sorted(
        savings,
        key=lambda saving: (not saving.settings.keys().isdisjoint(_CHANGES_TRAINING), saving.after),
    )


def advice(config: Config, spec: ModelSpec, world: int) -> str:
    """The best of `smaller` under a heading, one a line; empty if the planner can't tell."""
    try:
        savings = smaller(config, spec, world)
    except Exception:  # the run has failed already; the planner's own failure is no news
        return ""
    if not savings:
        return ""
    lines = [
        f"  {saving}{f' on {saving.ranks} ranks' if saving.ranks > world else ''}"
        for saving in savings[:SAVINGS]
    ]
    heading = f"What lowers the planned peak of {show_gib(savings[0].before)}:"
    return "\n".join([heading, *lines])
