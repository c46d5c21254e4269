"""What a plan says: as text for a terminal, and as data for JSON and the page."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.plan.advice import Change, largest_costs
from torchtitan.plan.axes import changes
from torchtitan.plan.collectives import collectives
from torchtitan.plan.memory import GIB, PARTS
from torchtitan.plan.predict import Plan
from torchtitan.plan.savings import advice
from torchtitan.plan.search import Found
from torchtitan.plan.workload import hardware_flops
from torchtitan.utils.text import aligned, plural


@dataclass(frozen=True)
class Run:
    """A training run of so many tokens."""

    tokens: float
    steps: float
    hours: float
    gpu_hours: float


def run_of(plan: Plan, tokens: float | None = None) -> Run:
    """The run that trains on `tokens`; by default on those of `training.steps`."""
    w = plan.workload
    tokens = tokens or float(w.tokens_per_step * w.config.training.steps)
    hours = tokens / (plan.tokens_per_second * w.world) / 3600
    return Run(tokens, tokens / w.tokens_per_step, hours, hours * w.world)


def _model(plan: Plan) -> str:
    return f"{plan.config.model.name} {plan.config.model.flavor}"


def _nodes(plan: Plan) -> int:
    return math.ceil(plan.workload.world / plan.hardware.gpus_per_node)


# ---- text


def as_text(plan: Plan, tokens: float | None = None) -> str:
    """The plan for a terminal.

    Args:
        tokens: to train on, for time and GPU-hours. Default: those of `training.steps`.
    """
    time, run = plan.time, run_of(plan, tokens)
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    bubble = f"; bubble {time.bubble:.0%} of the step" if plan.schedule else ""
    return "\n".join(
        [
            *_heading(plan),
            "",
            _memory_table(plan),
            "",
            f"Step {time.seconds:.3g} s, {plan.tokens_per_second:,.0f} tokens/s per GPU{mfu} (within "
            f"{plan.speed_band:.0%}, see docs/plan.md){bubble}",
            f"{rounded(run.tokens)} tokens: {plural(round(run.steps), 'step')}, {time_of(run.hours)}, "
            f"{rounded(run.gpu_hours)} GPU-hours",
            "",
            "Largest costs:",
            *_cost_lines(plan),
            *([] if plan.fits else advice(plan.config, plan.spec, plan.workload.world).splitlines()),
            *(f"note: {note}" for note in plan.notes),
        ]
    )


def _heading(plan: Plan) -> list[str]:
    w, t = plan.workload, plan.config.training
    batches = f" x {w.accumulation} accumulation steps" if w.accumulation > 1 else ""
    pipeline = f" in {plural(w.microbatches, 'microbatch')}, {plan.schedule}" if w.pipeline else ""
    return [
        f"{_model(plan)} on {w.world} x {plan.hardware.name} ({plural(_nodes(plan), 'node')}): "
        f"{layout_name(plan.layout)}",
        f"  {t.global_batch_size} x {w.seq_len} tokens per step; {plural(t.local_batch_size, 'row')} per rank"
        f"{batches}{pipeline}; activation checkpointing {plan.checkpointing}",
    ]


def _memory_table(plan: Plan) -> str:
    """GiB by part. Consecutive pipeline ranks with the same figures share a line."""
    usable = plan.hardware.usable_gib
    rows = [["pp rank", *PARTS, "peak", "headroom"]]
    for rank, memory in enumerate(plan.memory):
        peak = memory.reserved / GIB
        cells = [f"{gib:.1f}" for gib in (*(memory.parts[part] / GIB for part in PARTS), peak, usable - peak)]
        if rows[-1][1:] == cells:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{rank}"
        else:
            rows.append([str(rank), *cells])
    verdict = "fits in" if plan.fits else "DOES NOT FIT in"
    limits = f"{usable:.1f} of {plan.hardware.memory_gib:.1f}, chance {plan.chance_to_fit:.0%}"
    source = f"{plan.memory_source}; within {plan.memory_band:.0%}"
    return f"Memory, GiB: {verdict} {limits} ({source})\n{aligned(rows)}"


def _cost_lines(plan: Plan) -> list[str]:
    lines = []
    for cost in largest_costs(plan):
        lines.append(f"  {cost.share:4.0%}  {cost.part}")
        for change in cost.changes:
            settings = ", ".join(f"{key} = {value}" for key, value in change.settings.items())
            fit = "" if change.after.fits else ", DOES NOT FIT"
            effect = f"{change.gain:+.0%} speed, {change.after.peak_gib:.1f} GiB{fit}"
            lines.append(f"        {change.text}: {effect}  ({settings})")
        if not cost.changes:
            lines.append(f"        {cost.otherwise}")
    return lines


def search_table(found: Found) -> str:
    """The proposals of a search."""
    given = next((proposal.plan.config for proposal in found.best if proposal.baseline), found.best[0].plan.config)
    settings = [", ".join(f"{key} {value}" for key, value in changes(p.plan.config, given).items()) for p in found.best]
    rows = [["layout", "batch", "schedule", "checkpointing", "tokens/s/GPU", "GiB", "fits", "why"]]
    for proposal, changed in zip(found.best, settings, strict=True):
        plan, w = proposal.plan, proposal.plan.workload
        batch = f"{plan.config.training.local_batch_size} x {w.accumulation}"
        schedule = f"{plan.schedule}, {plural(w.microbatches, 'microbatch')}" if w.pipeline else "-"
        speed, peak, chance = f"{plan.tokens_per_second:,.0f}", f"{plan.peak_gib:.1f}", f"{plan.chance_to_fit:.0%}"
        layout, why = layout_name(plan.layout), f"{proposal.why}{f' ({changed})' if changed else ''}"
        rows.append([layout, batch, schedule, plan.checkpointing, speed, peak, chance, why])
    return f"Best of {plural(found.seen, 'legal configuration')}:\n{aligned(rows)}"


def comparison(this: Plan, other: Plan) -> str:
    """Two plans side by side."""
    figures: dict[str, Callable[[Plan], str]] = {
        "model": _model,
        "checkpointing": lambda plan: plan.checkpointing,
        "peak GiB": lambda plan: f"{plan.peak_gib:.1f}",
        "fits": lambda plan: "yes" if plan.fits else "NO",
        "tokens/s/GPU": lambda plan: f"{plan.tokens_per_second:,.0f}",
        "MFU": lambda plan: "-" if plan.mfu is None else f"{plan.mfu:.1%}",
        "step s": lambda plan: f"{plan.time.seconds:.3g}",
    }
    rows = [["", "this", "compared"]]
    rows += [[axis, str(degree), str(other.layout[axis])] for axis, degree in this.layout.items()]
    rows += [[name, figure(this), figure(other)] for name, figure in figures.items()]
    for part in dict.fromkeys([*this.time.parts, *other.time.parts]):
        rows.append([f"{part}, s", *(f"{plan.time.parts.get(part, 0.0):.3g}" for plan in (this, other))])
    return aligned(rows)


def time_of(hours: float) -> str:
    """A duration in the unit that suits it."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.0f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.2g} s"


def rounded(number: float) -> str:
    """A large number with four digits."""
    return f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.4g}"


# ---- data


def as_data(plan: Plan, tokens: float | None = None) -> dict[str, Any]:
    """Everything the plan says, for JSON. Arguments as for `as_text`."""
    w, hw, time = plan.workload, plan.hardware, plan.time
    exchanged = collectives(w)
    ranks = [
        {
            "pp_rank": rank,
            "reserved_gib": memory.reserved / GIB,
            "parts_gib": {part: size / GIB for part, size in memory.parts.items()},
        }
        for rank, memory in enumerate(plan.memory)
    ]
    return _layout_data(plan) | {
        "model": _model(plan),
        "world": w.world,
        "hardware": hw.name,
        "hardware_description": hw.description,
        "nodes": _nodes(plan),
        "gpus_per_node": hw.gpus_per_node,
        "seq_len": w.seq_len,
        "global_batch_size": w.config.training.global_batch_size,
        "memory": {
            "fits": plan.fits,
            "limit_gib": hw.memory_gib,
            "usable_gib": hw.usable_gib,
            "peak_gib": plan.peak_gib,
            "source": plan.memory_source,
            "band": plan.memory_band,
            "chance_to_fit": plan.chance_to_fit,
            "traced_gib": dict(plan.traced_gib),
            "ranks": ranks,
        },
        "time": {
            "step_s": time.seconds,
            "tokens_per_second_per_gpu": plan.tokens_per_second,
            "mfu": plan.mfu,
            "bubble": time.bubble,
            "band": plan.speed_band,
            "parts_s": dict(time.parts),
        },
        "flops": [{"kind": kind, "dtype": dtype, "flops": n} for (kind, dtype), n in hardware_flops(w).items()],
        "collectives": [
            {"axis": axis, "operation": operation, "calls": calls, "bytes": exchanged.bytes[axis, operation]}
            for (axis, operation), calls in exchanged.calls.items()
        ],
        "run": asdict(run_of(plan, tokens)),
        "costs": [
            {
                "part": cost.part,
                "share": cost.share,
                "changes": [_change_data(change) for change in cost.changes],
                "otherwise": cost.otherwise,
            }
            for cost in largest_costs(plan)
        ],
        "notes": list(plan.notes),
    }


def search_data(found: Found) -> dict[str, Any]:
    """A search, for JSON."""
    best = [
        _layout_data(proposal.plan)
        | _figures(proposal.plan)
        | {
            "chance_to_fit": proposal.plan.chance_to_fit,
            "why": proposal.why,
            "baseline": proposal.baseline,
        }
        for proposal in found.best
    ]
    return {"seen": found.seen, "points": found.points, "limit_gib": found.limit_gib, "best": best}


def _figures(plan: Plan) -> dict[str, Any]:
    return {"tokens_per_second_per_gpu": plan.tokens_per_second, "peak_gib": plan.peak_gib}


def _layout_data(plan: Plan) -> dict[str, Any]:
    return {
        "layout": plan.layout,
        "local_batch_size": plan.config.training.local_batch_size,
        "accumulation": plan.workload.accumulation,
        "microbatches": plan.workload.microbatches,
        "schedule": plan.schedule,
        "activation_checkpointing": plan.checkpointing,
    }


def _change_data(change: Change) -> dict[str, Any]:
    effect = {"gain": change.gain, "fits": change.after.fits} | _figures(change.after)
    return {"text": change.text, "settings": change.settings} | effect
