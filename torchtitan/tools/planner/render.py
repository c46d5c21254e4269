"""What a plan says: as text for a terminal, and as data for JSON and the page."""

import math
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.planner.advice import Change, advice, largest_costs, show_settings
from torchtitan.tools.planner.axes import changes
from torchtitan.tools.planner.memory import GIB, PARTS
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.search import SearchResult
from torchtitan.tools.planner.traffic import collectives, hardware_flops
from torchtitan.utils.wording import (
    aligned,
    plural,
    show_duration,
    show_gib,
    show_percent,
    show_rate,
    show_tokens,
)

_WIDTH = 100
"""Columns of text for a terminal."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run of so many tokens."""

    tokens: float
    steps: float
    hours: float
    gpu_hours: float


def run_of(plan: Plan, tokens: float | None = None) -> TrainingRun:
    """The run that trains on `tokens`; by default on those of `training.steps`."""
    w = plan.workload
    if tokens is None and plan.stages:
        return _run_of_stages(plan)
    tokens = tokens or float(w.tokens_per_step * w.config.training.steps)
    hours = tokens / (plan.tokens_per_second * w.world) / 3600
    return TrainingRun(tokens, tokens / w.tokens_per_step, hours, hours * w.world)


def _run_of_stages(plan: Plan) -> TrainingRun:
    steps = plan.config.training.steps
    ends = [*(first - 1 for first, _ in plan.stages[1:]), steps]
    tokens = seconds = 0.0
    for (first, stage), end in zip(plan.stages, ends, strict=True):
        count = max(min(end, steps) - first + 1, 0)
        tokens += count * stage.workload.tokens_per_step
        seconds += count * stage.time.seconds
    hours = seconds / 3600
    return TrainingRun(tokens, steps, hours, hours * plan.workload.world)


def _model(plan: Plan) -> str:
    return plan.config.model.label


def _nodes(plan: Plan) -> int:
    return math.ceil(plan.workload.world / plan.hardware.gpus_per_node)


# ---- text


def as_text(plan: Plan, tokens: float | None = None) -> str:
    """The plan for a terminal.

    Args:
        tokens: to train on, for time and GPU-hours. Default: those of `training.steps`.
    """
    time = plan.time
    run = run_of(plan, tokens)
    band = plan.speed_band
    mfu = ""
    if plan.mfu is not None:
        percent = 100 * plan.mfu
        mfu = f", MFU {show_percent(percent)} ({_range(percent, band, show_percent)})"
    bubble = f"; bubble {show_percent(100 * time.bubble)} of the step" if plan.schedule else ""
    step = (
        f"Step {time.seconds:.3g} s ({_range(time.seconds, band, '{:.3g}'.format, inverse=True)})"
    )
    speed = (
        f"{show_rate(plan.tokens_per_second)} tokens/s per GPU "
        f"({_range(plan.tokens_per_second, band, show_rate)})"
    )
    advised: list[str] = []
    if not plan.fits:
        advised = advice(
            (plan.tightest or plan).config, plan.spec, plan.workload.world
        ).splitlines()
    return "\n".join(
        [
            *_heading(plan),
            "",
            _memory_table(plan),
            *_host_line(plan),
            "",
            _wrapped(f"{step}, {speed}{mfu}{bubble}"),
            f"{show_tokens(run.tokens)} tokens: {plural(round(run.steps), 'step')}, "
            f"{show_duration(run.hours * 3600)}, {rounded(run.gpu_hours)} GPU-hours "
            f"({_range(run.gpu_hours, band, rounded, inverse=True)})",
            "9 of 10 such runs are within the ranges (docs/guides/plan.md)",
            "",
            "Largest costs:",
            *_cost_lines(plan),
            *map(_wrapped, advised),
            *(_wrapped(f"note: {note}") for note in plan.notes),
        ]
    )


def _heading(plan: Plan) -> list[str]:
    w = plan.workload
    t = plan.config.training
    batches = f" x {w.accumulation} accumulation steps" if w.accumulation > 1 else ""
    pipeline = ""
    if w.pipeline:
        stages = f" of {plan.stages_per_rank} stages per rank" if plan.stages_per_rank > 1 else ""
        pipeline = f" in {plural(w.microbatches, 'microbatch')}, {plan.schedule}{stages}"
    return [
        f"{_model(plan)} on {w.world} x {plan.hardware.name} ({plural(_nodes(plan), 'node')}): "
        f"{layout_name(plan.layout)}",
        _wrapped(
            f"  {t.global_batch_size} x {w.seq_len} tokens per step; "
            f"{plural(t.local_batch_size, 'row')} per rank{batches}{pipeline}; activation "
            f"checkpointing {plan.checkpointing}"
        ),
    ]


def _memory_table(plan: Plan) -> str:
    """GiB by part. Consecutive pipeline ranks with the same figures share a line."""
    usable = plan.hardware.usable_gib
    parts = ["comm" if part == "communication" else part for part in PARTS]
    rows = [["pp", *parts, "peak", "headroom"]]
    for rank, memory in enumerate(plan.memory):
        peak = memory.reserved / GIB
        cells = [
            f"{gib:.1f}"
            for gib in (*(memory.parts[part] / GIB for part in PARTS), peak, usable - peak)
        ]
        if rows[-1][1:] == cells:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{rank}"
        else:
            rows.append([str(rank), *cells])
    verdict = "fits in" if plan.fits else "DOES NOT FIT in"
    ends = _range(plan.peak_gib, plan.memory_band, "{:.1f}".format)
    verdict += (
        f" {usable:.1f} of {plan.hardware.memory_gib:.1f}, chance {likelihood(plan.chance_to_fit)}"
    )
    return f"Memory, GiB: {verdict}; peak {plan.peak_gib:.1f} ({ends})\n{aligned(rows)}"


def _host_line(plan: Plan) -> list[str]:
    """GiB of a host's memory, if the run keeps anything there."""
    parts = plan.host_gib
    total = sum(parts.values())
    if not total:
        return []
    known = plan.hardware.host_memory_gib
    verdict = ""
    if known is not None:
        verdict = f" {'fits in' if total < known else 'DOES NOT FIT in'} {known:,.0f};"
    listed = ", ".join(f"{part} {gib:,.1f}" for part, gib in parts.items())
    return [_wrapped(f"Host memory, GiB per host:{verdict} {total:,.1f} ({listed})")]


def _cost_lines(plan: Plan) -> list[str]:
    lines = []
    for cost in largest_costs(plan):
        lines.append(f"  {cost.share:4.0%}  {cost.part}")
        for change in cost.changes:
            fit = "" if change.after.fits else ", DOES NOT FIT"
            effect = f"{change.gain:+.0%} speed, {show_gib(change.after.peak_gib)}{fit}"
            lines.append(f"        {change.text}: {effect}")
            lines += [
                f"            {show_settings({key: value})}"
                for key, value in change.settings.items()
            ]
    return lines


def _wrapped(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(text, _WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False)


def search_table(result: SearchResult) -> str:
    """The proposals of a search."""
    original = next(
        (proposal.plan.config for proposal in result.best if proposal.baseline),
        result.best[0].plan.config,
    )
    settings = [
        ", ".join(f"{key} {value}" for key, value in changes(p.plan.config, original).items())
        for p in result.best
    ]
    rows = [["layout", "batch", "schedule", "recomputes", "tokens/s", "at least", "GiB", "fits"]]
    reasons = []
    for proposal, changed in zip(result.best, settings, strict=True):
        plan = proposal.plan
        w = proposal.plan.workload
        batch = f"{plan.config.training.local_batch_size} x {w.accumulation}"
        deep = f", {plan.stages_per_rank} stages" if plan.stages_per_rank > 1 else ""
        schedule = f"{plan.schedule} x {w.microbatches}{deep}" if w.pipeline else "-"
        speed = show_rate(plan.tokens_per_second)
        low = show_rate(band_ends(plan.tokens_per_second, plan.speed_band)[0])
        peak = f"{plan.peak_gib:.1f}"
        chance = likelihood(plan.chance_to_fit)
        layout = layout_name(plan.layout)
        reasons.append(_wrapped(f"  {proposal.why}{f' ({changed})' if changed else ''}"))
        recomputed = {"none": "nothing"}.get(plan.checkpointing, plan.checkpointing)
        rows.append([layout, batch, schedule, recomputed, speed, low, peak, chance])
    head, *lines = aligned(rows).splitlines()
    listed = [text for pair in zip(lines, reasons, strict=True) for text in pair]
    count = plural(result.seen, "configuration")
    return "\n".join([f"Best of {count} (tokens/s per GPU):", head, *listed])


def comparison(this: Plan, other: Plan) -> str:
    """Two plans side by side."""
    figures: dict[str, Callable[[Plan], str]] = {
        "model": _model,
        "checkpointing": lambda plan: plan.checkpointing,
        "peak GiB": lambda plan: f"{plan.peak_gib:.1f}",
        "fits": lambda plan: "yes" if plan.fits else "NO",
        "tokens/s/GPU": lambda plan: show_rate(plan.tokens_per_second),
        "MFU": lambda plan: "-" if plan.mfu is None else show_percent(100 * plan.mfu),
        "step s": lambda plan: f"{plan.time.seconds:.3g}",
    }
    rows = [["", "this", "compared"]]
    rows += [[axis, str(degree), str(other.layout[axis])] for axis, degree in this.layout.items()]
    rows += [[name, figure(this), figure(other)] for name, figure in figures.items()]
    for part in dict.fromkeys([*this.time.parts, *other.time.parts]):
        rows.append(
            [f"{part}, s", *(f"{plan.time.parts.get(part, 0.0):.3g}" for plan in (this, other))]
        )
    return aligned(rows)


def band_ends(value: float, band: float, *, inverse: bool = False) -> tuple[float, float]:
    """The ends of a figure's band.

    Args:
        band: relative half-width, of the figure or, if `inverse`, of what it is inversely
        proportional to.
    """
    if inverse:
        return value / (1 + band), value / (1 - band)
    return value * (1 - band), value * (1 + band)


def _range(
    value: float, band: float, text: Callable[[float], str], *, inverse: bool = False
) -> str:
    return " to ".join(map(text, band_ends(value, band, inverse=inverse)))


def likelihood(chance: float) -> str:
    """A probability in percent; nothing that is computed from a model is certain."""
    return "< 1%" if chance < 0.01 else "> 99%" if chance > 0.99 else f"{chance:.0%}"


def rounded(number: float) -> str:
    """A large number with four digits."""
    return f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.4g}"


# ---- data


def as_data(plan: Plan, tokens: float | None = None) -> dict[str, Any]:
    """Everything the plan says, for JSON. Arguments as for `as_text`."""
    w = plan.workload
    hw = plan.hardware
    run = run_of(plan, tokens)
    exchanged = collectives(w)
    return _layout_data(plan) | {
        "model": _model(plan),
        "world": w.world,
        "hardware": hw.name,
        "hardware_description": hw.description,
        "nodes": _nodes(plan),
        "gpus_per_node": hw.gpus_per_node,
        "seq_len": w.seq_len,
        "global_batch_size": w.config.training.global_batch_size,
        "memory": _memory_data(plan),
        "time": _time_data(plan),
        "flops": [
            {"kind": kind, "dtype": dtype, "flops": n}
            for (kind, dtype), n in hardware_flops(w).items()
        ],
        "collectives": [
            {
                "axis": axis,
                "operation": operation,
                "calls": calls,
                "bytes": exchanged.bytes[axis, operation],
            }
            for (axis, operation), calls in exchanged.calls.items()
        ],
        "run": asdict(run)
        | {
            "range_hours": band_ends(run.hours, plan.speed_band, inverse=True),
            "range_gpu_hours": band_ends(run.gpu_hours, plan.speed_band, inverse=True),
        },
        "costs": [
            {
                "part": cost.part,
                "share": cost.share,
                "changes": [_change_data(change) for change in cost.changes],
            }
            for cost in largest_costs(plan)
        ],
        "notes": list(plan.notes),
    }


def _memory_data(plan: Plan) -> dict[str, Any]:
    ranks = [
        {
            "pp_rank": rank,
            "reserved_gib": memory.reserved / GIB,
            "parts_gib": {part: size / GIB for part, size in memory.parts.items()},
        }
        for rank, memory in enumerate(plan.memory)
    ]
    return {
        "fits": plan.fits,
        "limit_gib": plan.hardware.memory_gib,
        "usable_gib": plan.hardware.usable_gib,
        "peak_gib": plan.peak_gib,
        "chance_to_fit": plan.chance_to_fit,
        "band": plan.memory_band,
        "range_gib": band_ends(plan.peak_gib, plan.memory_band),
        "host_gib": plan.host_gib,
        "ranks": ranks,
    }


def _time_data(plan: Plan) -> dict[str, Any]:
    band = plan.speed_band
    step = plan.time.seconds
    speed = plan.tokens_per_second
    return {
        "step_s": step,
        "tokens_per_second_per_gpu": speed,
        "mfu": plan.mfu,
        "bubble": plan.time.bubble,
        "band": band,
        "ranges": {
            "step_s": band_ends(step, band, inverse=True),
            "tokens_per_second_per_gpu": band_ends(speed, band),
            "mfu": plan.mfu and band_ends(plan.mfu, band),
        },
        "parts_s": dict(plan.time.parts),
    }


def origin(argv: list[str], toml: str) -> dict[str, str]:
    """Where a plan comes from, for JSON: command, date in UTC, and planned configuration.

    Args:
        argv: arguments of the command.
        toml: the planned configuration.
    """
    command = shlex.join(["torchtitan", "plan", *argv])
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "toml": toml,
    }


def search_data(result: SearchResult) -> dict[str, Any]:
    """A search, for JSON."""
    best = [
        _layout_data(proposal.plan)
        | _figures(proposal.plan)
        | {
            "range_tokens_per_second_per_gpu": band_ends(
                proposal.plan.tokens_per_second, proposal.plan.speed_band
            ),
            "chance_to_fit": proposal.plan.chance_to_fit,
            "why": proposal.why,
            "baseline": proposal.baseline,
        }
        for proposal in result.best
    ]
    return {
        "seen": result.seen,
        "points": result.points,
        "limit_gib": result.limit_gib,
        "best": best,
    }


def _figures(plan: Plan) -> dict[str, Any]:
    return {"tokens_per_second_per_gpu": plan.tokens_per_second, "peak_gib": plan.peak_gib}


def _layout_data(plan: Plan) -> dict[str, Any]:
    return {
        "layout": plan.layout,
        "local_batch_size": plan.config.training.local_batch_size,
        "accumulation": plan.workload.accumulation,
        "microbatches": plan.workload.microbatches,
        "schedule": plan.schedule,
        "stages_per_rank": plan.stages_per_rank,
        "activation_checkpointing": plan.checkpointing,
    }


def _change_data(change: Change) -> dict[str, Any]:
    effect = {"gain": change.gain, "fits": change.after.fits} | _figures(change.after)
    return {"text": change.text, "settings": change.settings} | effect
