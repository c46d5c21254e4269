"""A plan as text for a terminal, and as data for JSON and the page."""

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.planner.advice import advice, largest_costs, show_settings
from torchtitan.tools.planner.memory import CATEGORIES, GIB
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.search import SearchResult
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
    """The run that trains on `tokens`; by default on the tokens of `training.steps`."""
    stages = plan.stages or ((plan.config.training.steps, plan),)
    if tokens is not None:
        stages = ((tokens / plan.workload.tokens_per_step, plan),)
    hours = sum(steps * stage.time.seconds for steps, stage in stages) / 3600
    return TrainingRun(
        tokens or float(sum(steps * stage.workload.tokens_per_step for steps, stage in stages)),
        sum(steps for steps, _ in stages),
        hours,
        hours * plan.workload.world,
    )


def _nodes(plan: Plan) -> int:
    return math.ceil(plan.workload.world / plan.hardware.gpus_per_node)


# ---- text


def as_text(plan: Plan, tokens: float | None = None) -> str:
    """The plan for a terminal.

    Args:
        tokens: to train on, for time and GPU-hours. Default: the tokens of `training.steps`.
    """
    advice_lines: list[str] = []
    if not plan.fits:
        advice_lines = advice(plan.tightest.config, plan.spec, plan.workload.world).splitlines()
    return "\n".join(
        [
            *_heading(plan),
            "",
            _memory_table(plan),
            *_host_line(plan),
            "",
            _step_line(plan),
            _run_line(plan, run_of(plan, tokens)),
            "9 of 10 such runs are within the ranges (docs/guides/plan.md)",
            "",
            "Largest costs:",
            *_cost_lines(plan),
            *map(_wrap, advice_lines),
            *(_wrap(f"note: {note}") for note in plan.notes),
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
    gpus = f"{w.world} x {plan.hardware.name} ({plural(_nodes(plan), 'node')})"
    return [
        f"{plan.config.model.label} on {gpus}: {layout_name(plan.layout)}",
        _wrap(
            f"  {t.global_batch_size} x {w.seq_len} tokens per step; "
            f"{plural(t.local_batch_size, 'row')} per rank{batches}{pipeline}; activation "
            f"checkpointing {plan.checkpointing}"
        ),
    ]


def _memory_table(plan: Plan) -> str:
    """GiB by category. Consecutive pipeline ranks with the same figures share a line."""
    usable = plan.hardware.usable_gib
    names = ["comm" if name == "communication" else name for name in CATEGORIES]
    rows = [["pp", *names, "peak", "headroom"]]
    for rank, memory in enumerate(plan.memory):
        peak = memory.reserved / GIB
        cells = [
            f"{gib:.1f}"
            for gib in (
                *(memory.by_category[name] / GIB for name in CATEGORIES),
                peak,
                usable - peak,
            )
        ]
        if rows[-1][1:] == cells:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{rank}"
        else:
            rows.append([str(rank), *cells])
    verdict = "fits in" if plan.fits else "DOES NOT FIT in"
    ends = _between(plan.peak_range, "{:.1f}".format)
    verdict += (
        f" {usable:.1f} of {plan.hardware.memory_gib:.1f}, chance {likelihood(plan.chance_to_fit)}"
    )
    return f"Memory, GiB: {verdict}; peak {plan.peak_gib:.1f} ({ends})\n{aligned(rows)}"


def _host_line(plan: Plan) -> list[str]:
    """GiB of a host's memory, if the run keeps anything there."""
    sizes = plan.host_gib
    total = sum(sizes.values())
    if not total:
        return []
    limit = plan.hardware.host_memory_gib
    verdict = ""
    if limit is not None:
        verdict = f" {'fits in' if total < limit else 'DOES NOT FIT in'} {limit:,.0f};"
    by_category = ", ".join(f"{name} {gib:,.1f}" for name, gib in sizes.items())
    return [_wrap(f"Host memory, GiB per host:{verdict} {total:,.1f} ({by_category})")]


def _step_line(plan: Plan) -> str:
    step = plan.time.seconds
    speed = plan.tokens_per_second
    figures = [
        f"Step {step:.3g} s ({_between(plan.time_range(step), '{:.3g}'.format)})",
        f"{show_rate(speed)} tokens/s per GPU ({_between(plan.speed_range, show_rate)})",
    ]
    if plan.mfu and plan.mfu_range:
        figures.append(f"MFU {_percent(plan.mfu)} ({_between(plan.mfu_range, _percent)})")
    bubble = f"; bubble {_percent(plan.time.bubble)} of the step" if plan.schedule else ""
    return _wrap(", ".join(figures) + bubble)


def _run_line(plan: Plan, run: TrainingRun) -> str:
    return (
        f"{show_tokens(run.tokens)} tokens: {plural(round(run.steps), 'step')}, "
        f"{show_duration(run.hours * 3600)}, {show_rounded(run.gpu_hours)} GPU-hours "
        f"({_between(plan.time_range(run.gpu_hours), show_rounded)})"
    )


def _cost_lines(plan: Plan) -> list[str]:
    lines = []
    for cost in largest_costs(plan):
        lines.append(f"  {cost.share:4.0%}  {cost.cause}")
        for change in cost.changes:
            fit = "" if change.after.fits else ", DOES NOT FIT"
            effect = f"{change.gain:+.0%} speed, {show_gib(change.after.peak_gib)}{fit}"
            lines.append(f"        {change.text}: {effect}")
            lines += [
                f"            {show_settings({key: value})}"
                for key, value in change.settings.items()
            ]
    return lines


def _wrap(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(text, _WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False)


def search_table(result: SearchResult) -> str:
    """The proposals of a search."""
    rows = [["layout", "batch", "schedule", "recomputes", "tokens/s", "at least", "GiB", "fits"]]
    reasons = []
    for proposal in result.best:
        plan = proposal.plan
        w = plan.workload
        reasons.append(_wrap(f"  {proposal.why}"))
        deep = f", {plan.stages_per_rank} stages" if plan.stages_per_rank > 1 else ""
        rows.append(
            [
                layout_name(plan.layout),
                f"{plan.config.training.local_batch_size} x {w.accumulation}",
                f"{plan.schedule} x {w.microbatches}{deep}" if w.pipeline else "-",
                {"none": "nothing"}.get(plan.checkpointing, plan.checkpointing),
                show_rate(plan.tokens_per_second),
                show_rate(plan.speed_range[0]),
                f"{plan.peak_gib:.1f}",
                likelihood(plan.chance_to_fit),
            ]
        )
    head, *lines = aligned(rows).splitlines()
    proposal_lines = [text for pair in zip(lines, reasons, strict=True) for text in pair]
    count = plural(result.seen, "configuration")
    return "\n".join([f"Best of {count} (tokens/s per GPU):", head, *proposal_lines])


def comparison(this: Plan, other: Plan) -> str:
    """Two plans side by side."""
    figures: dict[str, Callable[[Plan], str]] = {
        "model": lambda plan: plan.config.model.label,
        "checkpointing": lambda plan: plan.checkpointing,
        "peak GiB": lambda plan: f"{plan.peak_gib:.1f}",
        "fits": lambda plan: "yes" if plan.fits else "NO",
        "tokens/s/GPU": lambda plan: show_rate(plan.tokens_per_second),
        "MFU": lambda plan: "-" if plan.mfu is None else _percent(plan.mfu),
        "step s": lambda plan: f"{plan.time.seconds:.3g}",
    }
    rows = [["", "this", "compared"]]
    rows += [[axis, str(degree), str(other.layout[axis])] for axis, degree in this.layout.items()]
    rows += [[name, figure(this), figure(other)] for name, figure in figures.items()]
    for cause in dict.fromkeys([*this.time.by_cause, *other.time.by_cause]):
        rows.append(
            [
                f"{cause}, s",
                *(f"{plan.time.by_cause.get(cause, 0.0):.3g}" for plan in (this, other)),
            ]
        )
    return aligned(rows)


def _between(ends: Iterable[float], text: Callable[[float], str]) -> str:
    return " to ".join(map(text, ends))


def _percent(share: float) -> str:
    return show_percent(100 * share)


def likelihood(chance: float) -> str:
    """A probability in percent; nothing that is computed from a model is certain."""
    return "< 1%" if chance < 0.01 else "> 99%" if chance > 0.99 else f"{chance:.0%}"


def show_rounded(number: float) -> str:
    """A large number with four digits."""
    return f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.4g}"


# ---- data


def summary(plan: Plan) -> dict[str, Any]:
    """A plan's layout and main figures, for JSON."""
    w = plan.workload
    return {
        "world": w.world,
        "layout": plan.layout,
        "global_batch_size": w.config.training.global_batch_size,
        "local_batch_size": w.config.training.local_batch_size,
        "accumulation": w.accumulation,
        "microbatches": w.microbatches,
        "schedule": plan.schedule,
        "stages_per_rank": plan.stages_per_rank,
        "activation_checkpointing": plan.checkpointing,
        "tokens_per_second_per_gpu": plan.tokens_per_second,
        "range_tokens_per_second_per_gpu": plan.speed_range,
        "peak_gib": plan.peak_gib,
        "chance_to_fit": plan.chance_to_fit,
        "fits": plan.fits,
    }


def as_data(plan: Plan, tokens: float | None = None) -> dict[str, Any]:
    """The plan's figures, for JSON. Arguments as for `as_text`."""
    hw = plan.hardware
    run = run_of(plan, tokens)
    return summary(plan) | {
        "model": plan.config.model.label,
        "hardware": hw.name,
        "hardware_description": hw.description,
        "nodes": _nodes(plan),
        "gpus_per_node": hw.gpus_per_node,
        "seq_len": plan.workload.seq_len,
        "memory": _memory_data(plan),
        "time": _time_data(plan),
        "run": asdict(run)
        | {
            "range_hours": plan.time_range(run.hours),
            "range_gpu_hours": plan.time_range(run.gpu_hours),
        },
        "costs": [
            {
                "part": cost.cause,
                "share": cost.share,
                "changes": [
                    {"text": change.text, "settings": change.settings, "gain": change.gain}
                    | summary(change.after)
                    for change in cost.changes
                ],
            }
            for cost in largest_costs(plan)
        ],
        "notes": plan.notes,
    }


def _memory_data(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "limit_gib": plan.hardware.memory_gib,
        "usable_gib": plan.hardware.usable_gib,
        "peak_gib": plan.peak_gib,
        "chance_to_fit": plan.chance_to_fit,
        "band": plan.memory_band,
        "range_gib": plan.peak_range,
        "host_gib": plan.host_gib,
        "ranks": [
            {
                "pp_rank": rank,
                "reserved_gib": memory.reserved / GIB,
                "parts_gib": {name: size / GIB for name, size in memory.by_category.items()},
            }
            for rank, memory in enumerate(plan.memory)
        ],
    }


def _time_data(plan: Plan) -> dict[str, Any]:
    step = plan.time.seconds
    return {
        "step_s": step,
        "tokens_per_second_per_gpu": plan.tokens_per_second,
        "mfu": plan.mfu,
        "bubble": plan.time.bubble,
        "band": plan.speed_band,
        "ranges": {
            "step_s": plan.time_range(step),
            "tokens_per_second_per_gpu": plan.speed_range,
            "mfu": plan.mfu_range,
        },
        "parts_s": plan.time.by_cause,
    }


def search_data(result: SearchResult) -> dict[str, Any]:
    """A search, for JSON."""
    return {
        "seen": result.seen,
        "points": result.points,
        "best": [
            summary(proposal.plan) | {"why": proposal.why, "baseline": proposal.baseline}
            for proposal in result.best
        ],
    }
