"""What a plan says: memory against the limit, speed, the largest costs in words, and what would change each."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.derive import AXES, derive, layout_name, replace
from torchtitan.config.schema import Config
from torchtitan.config.stages import pipeline_stages
from torchtitan.config.validate import validate
from torchtitan.models import ModelSpec
from torchtitan.plan.costs import StepTime, collectives, step_time
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.memory import memory_of
from torchtitan.plan.workload import Workload, hardware_flops
from torchtitan.train.preflight import check_tensor_parallel
from torchtitan.utils.errors import ConfigError

GIB = 2**30
MEMORY_BAND = 0.10
"""Within which the closed forms met every published measurement whose sources agree."""
_DIFFERENT = 0.05
"""From where on it is worth saying that a trace and the closed forms disagree."""
_TRACEABLE = 320
"""Layers x microbatches of a rank that are traced: about a tenth of a second each."""


@dataclass(frozen=True)
class RankMemory:
    """The peak of one pipeline rank, in bytes."""

    reserved: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """One configuration on one hardware."""

    workload: Workload
    spec: ModelSpec
    hardware: Hardware
    time: StepTime
    memory: tuple[RankMemory, ...]
    """Of each pipeline rank."""
    source: str = "closed form"
    """Where `memory` comes from."""
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.workload.config

    @property
    def peak_gib(self) -> float:
        return max(rank.reserved for rank in self.memory) / GIB

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.hardware.usable_gib

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, as the trainer logs it: of the bf16 peak, if that is what computes."""
        if self.workload.width != 2:
            return None
        flops = self.spec.flops_per_token(self.workload.args, self.workload.seq_len)
        return flops * self.time.tokens_per_second / self.hardware.bf16

    @property
    def layout(self) -> dict[str, int]:
        w = self.workload
        return dict(zip(AXES, (w.pp, w.replicate, w.shard, w.cp, w.tp), strict=True))


def legal(config: Config, spec: ModelSpec, world: int) -> Workload:
    """The workload of a configuration that need not be complete.

    Raises:
        ConfigError: what the trainer refuses it for.
    """
    config, _ = derive(config, world)
    validate(config, world)
    args = spec.args(config.model.flavor, config.model.overrides, max_seq_len=config.training.seq_len)
    if problems := list(check_tensor_parallel(config, spec.tensor_parallel_sizes(args))):
        raise ConfigError(problems)
    return Workload(
        config, args, pipeline_stages(config, spec.module_flops(args, config.training.seq_len), spec.tied_modules(args))
    )


def answer(workload: Workload, spec: ModelSpec, hardware: Hardware) -> Answer:
    """Time and memory by the closed forms."""
    made = (memory_of(workload, rank) for rank in range(workload.pp))
    memory = tuple(RankMemory(m.reserved, m.parts) for m in made)
    notes = []
    if workload.float8 and not hardware.fp8:
        notes.append(f"{hardware.name} has no 8-bit matrix products: the run would refuse model.converters there")
    return Answer(workload, spec, hardware, step_time(workload, hardware), memory, notes=notes)


def traceable(w: Workload, pp_rank: int) -> bool:
    """Whether a trace takes half a minute or so, not many."""
    layers = sum(stage.layers for stage in w.of_rank(pp_rank))
    return layers * w.microbatches * min(w.accumulation, 3) <= _TRACEABLE


def traced(a: Answer, config: Config) -> Answer:
    """The same answer with the memory of its first, largest and last pipeline rank traced, not computed.

    Reserved memory is the larger of the two figures: a replay of allocations leaves no more holes than one stream of
    them makes, while the closed forms know from published runs what a real one holds.

    Args:
        config: the answer's, with files that are on this machine.
    """
    from torchtitan.plan.trace import trace_ranks

    w, device = a.workload, a.hardware.device
    largest = max(range(w.pp), key=lambda rank: a.memory[rank].reserved)
    ranks = sorted({0, largest, w.pp - 1})
    if not all(traceable(w, rank) for rank in ranks):
        a.notes.append("memory is computed, not traced: a trace of so many layers and microbatches takes minutes")
        return a
    made = {}
    for trace in trace_ranks(config, w.world, ranks, device_type=device):
        computed = a.memory[trace.pp_rank].reserved if device == "cuda" else 0.0
        parts: dict[str, float] = {part: float(size) for part, size in trace.memory.items()}
        reserved = max(float(trace.peak_reserved), computed)
        parts["other"] += reserved - trace.peak_active  # what the allocator holds and nobody uses
        made[trace.pp_rank] = RankMemory(reserved, parts)
        if computed > trace.peak_reserved * (1 + _DIFFERENT):
            a.notes.append(
                f"pp rank {trace.pp_rank}: the trace says {trace.peak_reserved / GIB:.1f} GiB; the closed forms, which "
                f"are fitted to published runs, {computed / GIB:.1f}, and that counts"
            )
    # The others are off by as much: not in the state, whose size is known, but in what comes and goes.
    now = a.memory[largest]
    known = now.parts["parameters"] + now.parts["optimizer"]
    factor = (made[largest].reserved - known) / (now.reserved - known)
    memory = tuple(made.get(rank) or _scaled(form, factor) for rank, form in enumerate(a.memory))
    names = ", ".join(map(str, ranks))
    source = "traced" if len(ranks) == w.pp else f"pp ranks {names} traced, the others scaled to them"
    return dataclasses.replace(a, memory=memory, source=source)


def _scaled(memory: RankMemory, factor: float) -> RankMemory:
    kept = ("parameters", "optimizer")
    parts = {part: size * (1 if part in kept else factor) for part, size in memory.parts.items()}
    return RankMemory(sum(parts.values()), parts)


# ---- what would change the largest costs


@dataclass(frozen=True)
class Change:
    """A change of the configuration that makes a part cheaper."""

    text: str
    settings: dict[str, Any]
    after: Answer


def changes(now: Answer, part: str) -> list[Change]:
    """Legal changes that lower `part` and make training faster, the best first; those that don't fit come last."""
    made = []
    for text, settings in _candidates(now.workload, now.hardware, part):
        config = now.config
        for key, value in settings.items():
            config = replace(config, key, value)
        try:
            after = answer(legal(config, now.spec, now.workload.world), now.spec, now.hardware)
        except ConfigError:
            continue
        if after.time.tokens_per_second > now.time.tokens_per_second * 1.005:
            made.append(Change(text, settings, after))
    return sorted(made, key=lambda change: (not change.after.fits, -change.after.time.tokens_per_second))


def _candidates(w: Workload, hw: Hardware, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what, keys to set) that may lower a part."""
    ac, p, t = w.config.activation_checkpoint, w.config.parallelism, w.config.training
    mode, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    degrees = "parallelism.tensor_parallel_degree", "parallelism.data_parallel_shard_degree"
    batch = {"training.global_batch_size": 2 * t.global_batch_size, "training.local_batch_size": 2 * t.local_batch_size}
    compiled = {"compile.enable": True, "compile.components": ["model", "loss"]}
    by_operation = ac.mode == "selective" and ac.selective_ac_option == "op"
    if part in ("matrix products", "pointwise", "attention") and ac.mode != "none":
        if not by_operation:
            yield "keep attention and every second product", {mode: "selective", option: "op"}
        yield "recompute nothing", {mode: "none"}
    if part == "matrix products" and hw.fp8 and not (w.float8 or w.mx):
        yield "Float8", {"model.converters": ["float8"]}
    if part in ("pointwise", "head and loss", "8-bit casts") and not (w.compiled and w.loss_compiled):
        yield "compile", compiled
    if part == "communication: tp":
        if not w.async_tp:
            yield "asynchronous TP", compiled | {"parallelism.enable_async_tensor_parallel": True}
        yield "half the TP, twice the shards", {degrees[0]: w.tp // 2, degrees[1]: 2 * w.shard} | _same_batch(w)
    if part == "communication: cp":
        yield "from rank to rank", {"parallelism.context_parallel_rotate_method": "alltoall"}
    if part == "pipeline bubble":
        if t.local_batch_size > p.pipeline_parallel_microbatch_size:
            size = "parallelism.pipeline_parallel_microbatch_size"
            yield "smaller microbatches", {size: max(1, p.pipeline_parallel_microbatch_size // 2)}
        yield "twice the batch", batch
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
            yield f"schedule {schedule}", {"parallelism.pipeline_parallel_schedule": schedule}
    if part in ("communication: dp", "slowed by communication", "optimizer", "host"):
        yield "twice the batch", batch


def _same_batch(w: Workload) -> dict[str, Any]:
    """Half the rows for each of twice as many ranks."""
    return {"training.local_batch_size": max(1, w.config.training.local_batch_size // 2)}


# ---- as data and as text


def report(a: Answer, tokens: float | None = None) -> dict[str, Any]:
    """Everything an answer says, as JSON.

    Args:
        tokens: to train on, for time and GPU-hours. Default: those of `training.steps`.
    """
    w, hw, time = a.workload, a.hardware, a.time
    tokens = tokens or float(w.tokens_per_step * w.config.training.steps)
    hours = tokens / (time.tokens_per_second * w.world) / 3600
    ranks = []
    for rank, memory in enumerate(a.memory):
        parts = {part: size / GIB for part, size in memory.parts.items()}
        ranks.append({"pp_rank": rank, "reserved_gib": memory.reserved / GIB, "parts_gib": parts})
    exchanged = collectives(w)
    traffic = [
        {"axis": axis, "operation": operation, "calls": calls, "bytes": exchanged.bytes[axis, operation]}
        for (axis, operation), calls in exchanged.calls.items()
    ]
    costs: list[dict[str, Any]] = []
    told: set[str] = set()
    for part, seconds in list(time.parts.items())[:3]:
        found = changes(a, part)
        new = [change for change in found if change.text not in told][:2]
        told |= {change.text for change in new}
        costs.append(
            {
                "part": part,
                "share": seconds / time.seconds,
                "changes": [_change(a, change) for change in new],
                "otherwise": "what is said above lowers this too"
                if found
                else "nothing in the configuration lowers this",
            }
        )
    return {
        "model": f"{w.config.model.name} {w.config.model.flavor}",
        "world": w.world,
        "hardware": hw.name,
        "hardware_description": hw.description,
        "nodes": math.ceil(w.world / hw.gpus_per_node),
        "gpus_per_node": hw.gpus_per_node,
        "layout": a.layout,
        "seq_len": w.seq_len,
        "global_batch_size": w.config.training.global_batch_size,
        "local_batch_size": w.config.training.local_batch_size,
        "accumulation": w.accumulation,
        "microbatches": w.microbatches,
        "schedule": _schedule(w),
        "activation_checkpointing": checkpointing(w.config),
        "memory": {
            "fits": a.fits,
            "limit_gib": hw.memory_gib,
            "usable_gib": hw.usable_gib,
            "peak_gib": a.peak_gib,
            "source": a.source,
            "band": MEMORY_BAND,
            "ranks": ranks,
        },
        "time": {
            "step_s": time.seconds,
            "tokens_per_second_per_gpu": time.tokens_per_second,
            "mfu": a.mfu,
            "bubble": time.bubble,
            "band": hw.band,
            "parts_s": dict(time.parts),
        },
        "flops": [{"kind": k, "dtype": d, "flops": f} for (k, d), f in hardware_flops(w).items()],
        "collectives": traffic,
        "run": {"tokens": tokens, "steps": tokens / w.tokens_per_step, "hours": hours, "gpu_hours": hours * w.world},
        "costs": costs,
        "notes": a.notes,
    }


def checkpointing(config: Config) -> str:
    ac = config.activation_checkpoint
    return f"{ac.mode} {ac.selective_ac_option}" if ac.mode == "selective" else ac.mode


def _schedule(w: Workload) -> str | None:
    return (w.pipeline.csv_file or w.config.parallelism.pipeline_parallel_schedule) if w.pipeline else None


def _change(now: Answer, change: Change) -> dict[str, Any]:
    after = change.after
    return {
        "text": change.text,
        "settings": change.settings,
        "tokens_per_second_per_gpu": after.time.tokens_per_second,
        "gain": after.time.tokens_per_second / now.time.tokens_per_second - 1,
        "peak_gib": after.peak_gib,
        "fits": after.fits,
    }


def text(r: dict[str, Any]) -> str:
    """The report for a terminal."""
    memory, time, run = r["memory"], r["time"], r["run"]
    mfu = "" if time["mfu"] is None else f", MFU {time['mfu']:.1%}"
    lines = [
        f"{r['model']} on {r['world']} x {r['hardware']} ({r['nodes']} nodes): {layout_name(r['layout'])}",
        f"  {r['global_batch_size']} x {r['seq_len']} tokens a step; {r['local_batch_size']} rows a rank"
        + (f", {r['accumulation']} accumulated" if r["accumulation"] > 1 else "")
        + (f" in {r['microbatches']} microbatches, {r['schedule']}" if r["schedule"] else "")
        + f"; activation checkpointing {r['activation_checkpointing']}",
        "",
        _memory_table(memory),
        "",
        f"Step {time['step_s']:.3g} s, {time['tokens_per_second_per_gpu']:,.0f} tokens/s per GPU{mfu}"
        f" (within {time['band']:.0%}, see docs/plan.md)"
        + (f"; bubble {time['bubble']:.0%} of the step" if r["schedule"] else ""),
        f"{run['tokens']:.4g} tokens take {run['steps']:,.0f} steps, {_hours(run['hours'])}, "
        f"{run['gpu_hours']:,.4g} GPU-hours",
        "",
        "Largest costs:",
    ]
    for cost in r["costs"]:
        lines += [f"  {cost['share']:4.0%}  {cost['part']}"]
        for change in cost["changes"]:
            keys = ", ".join(f"{key} = {value}" for key, value in change["settings"].items())
            fit = "" if change["fits"] else ", DOES NOT FIT"
            gain = f"{change['gain']:+.0%} speed, {change['peak_gib']:.1f} GiB{fit}"
            lines += [f"        {change['text']}: {gain}  ({keys})"]
        if not cost["changes"]:
            lines += [f"        {cost['otherwise']}"]
    return "\n".join([*lines, *(f"note: {note}" for note in r["notes"])])


def _memory_table(memory: dict[str, Any]) -> str:
    """GiB by part; pipeline ranks of the same memory share a line."""
    names = list(memory["ranks"][0]["parts_gib"])
    head = ["pp rank", *names, "peak", "head-room"]
    rows: list[list[str]] = []
    for rank in memory["ranks"]:
        sizes = [f"{rank['parts_gib'][name]:.1f}" for name in names]
        room = memory["usable_gib"] - rank["reserved_gib"]
        cells = [*sizes, f"{rank['reserved_gib']:.1f}", f"{room:.1f}"]
        if rows and rows[-1][1:] == cells:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{rank['pp_rank']}"
        else:
            rows.append([str(rank["pp_rank"]), *cells])
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    verdict = "fits" if memory["fits"] else "DOES NOT FIT"
    title = (
        f"Memory, GiB: {verdict} in {memory['usable_gib']:.1f} of {memory['limit_gib']:.1f} "
        f"({memory['source']}, within {memory['band']:.0%})"
    )
    return "\n".join([title, *lines])


def _hours(hours: float) -> str:
    return (
        f"{hours / 24:,.1f} days"
        if hours >= 48
        else f"{hours:.1f} hours"
        if hours >= 1
        else f"{hours * 60:.0f} minutes"
    )
