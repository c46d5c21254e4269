"""A plan as text for a terminal, and as data for JSON and the page."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.planner.advice import advice, largest_costs, show_settings
from torchtitan.tools.planner.memory import CATEGORIES, GIB
from torchtitan.tools.planner.predict import Plan, ends, unmeasured
from torchtitan.tools.planner.search import SearchResult
from torchtitan.tools.web import web_page
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
    lines = [*_heading(plan), "", _memory_table(plan), *_host_line(plan), "", _step_line(plan)]
    lines.append(_run_line(plan, run_of(plan, tokens)))
    if not unmeasured(plan.workload, plan.hardware):
        lines.append("9 of 10 such runs are within the ranges (docs/guides/plan.md)")
    lines += ["", "Largest costs:", *_cost_lines(plan)]
    if not plan.fits:
        config = plan.tightest.config
        lines += map(wrap, advice(config, plan.spec, plan.workload.world).splitlines())
    return "\n".join([*lines, *(wrap(f"note: {note}") for note in plan.notes)])


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
        f"{plan.model} on {gpus}: {layout_name(plan.layout)}",
        wrap(
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
        sizes = [memory.by_category[name] / GIB for name in CATEGORIES]
        cells = [f"{gib:.1f}" for gib in (*sizes, peak, usable - peak)]
        if rows[-1][1:] == cells:
            rows[-1][0] = f"{rows[-1][0].split('-')[0]}-{rank}"
        else:
            rows.append([str(rank), *cells])
    verdict = "fits in" if plan.fits else "DOES NOT FIT in"
    peaks = _between(plan.peak_range, "{:.1f}".format)
    verdict += (
        f" {usable:.1f} of {plan.hardware.memory_gib:.1f}, chance {likelihood(plan.chance_to_fit)}"
    )
    return f"Memory, GiB: {verdict}; peak {plan.peak_gib:.1f} ({peaks})\n{aligned(rows)}"


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
    return [wrap(f"Host memory, GiB per host:{verdict} {total:,.1f} ({by_category})")]


def _step_line(plan: Plan) -> str:
    step = plan.time.seconds
    speed = plan.tokens_per_second
    figures = [
        f"Step {step:.3g} s ({_between(plan.time_range(step), '{:.3g}'.format)})",
        f"{show_rate(speed)} tokens/s per GPU ({_between(plan.speed_range, show_rate)})",
    ]
    if plan.mfu:
        mfu_range = ends(plan.mfu, plan.speed_band)
        figures.append(f"MFU {_percent(plan.mfu)} ({_between(mfu_range, _percent)})")
    bubble = f"; bubble {_percent(plan.time.bubble)} of the step" if plan.schedule else ""
    return wrap(", ".join(figures) + bubble)


def _run_line(plan: Plan, run: TrainingRun) -> str:
    return (
        f"{show_tokens(run.tokens)} tokens: {plural(round(run.steps), 'step')}, "
        f"{show_duration(run.hours * 3600)}, {show_rounded(run.gpu_hours)} GPU-hours "
        f"({_between(plan.time_range(run.gpu_hours), show_rounded)})"
    )


def _cost_lines(plan: Plan) -> Iterator[str]:
    for cause, changes in largest_costs(plan).items():
        yield f"  {plan.time.by_cause[cause] / plan.time.seconds:4.0%}  {cause}"
        for change in changes:
            effect = f"{change.gain:+.0%} speed, {show_gib(change.after.peak_gib)}"
            yield wrap(f"        {effect}: {show_settings(change.settings)}")


def wrap(text: str) -> str:
    """The text in lines for a terminal."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(text, _WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False)


def _schedule(plan: Plan) -> str:
    if plan.schedule is None:
        return "-"
    deep = f", {plan.stages_per_rank} stages" if plan.stages_per_rank > 1 else ""
    return f"{plan.schedule} x {plan.workload.microbatches}{deep}"


FIGURES: dict[str, Callable[[Plan], str]] = {
    "layout": lambda plan: layout_name(plan.layout),
    "batch": lambda plan: f"{plan.config.training.local_batch_size} x {plan.workload.accumulation}",
    "schedule": _schedule,
    "recomputes": lambda plan: plan.checkpointing.replace("none", "nothing"),
    "tokens/s": lambda plan: show_rate(plan.tokens_per_second),
    "at least": lambda plan: show_rate(plan.speed_range[0]),
    "GiB": lambda plan: f"{plan.peak_gib:.1f}",
    "fits": lambda plan: likelihood(plan.chance_to_fit),
}
"""Columns of tables of plans. Speeds are per GPU."""


def search_table(result: SearchResult) -> str:
    """The proposals of a search."""
    rows = [[figure(proposal.plan) for figure in FIGURES.values()] for proposal in result.best]
    head, *lines = aligned([[*FIGURES], *rows]).splitlines()
    count = plural(result.seen, "configuration")
    table = [f"Best of {count} (tokens/s per GPU):", head]
    for line, proposal in zip(lines, result.best, strict=True):
        table += [line, wrap(f"  {proposal.why}")]
    return "\n".join(table)


def _between(figures: Iterable[float], text: Callable[[float], str]) -> str:
    return " to ".join(map(text, figures))


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
        "model": plan.model,
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
                "part": cause,
                "share": plan.time.by_cause[cause] / plan.time.seconds,
                "changes": [
                    {"settings": change.settings, "gain": change.gain} | summary(change.after)
                    for change in changes
                ],
            }
            for cause, changes in largest_costs(plan).items()
        ],
        "notes": plan.notes,
    }


def _memory_data(plan: Plan) -> dict[str, Any]:
    return {
        "limit_gib": plan.hardware.memory_gib,
        "usable_gib": plan.hardware.usable_gib,
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
        "mfu": plan.mfu,
        "bubble": plan.time.bubble,
        "band": plan.speed_band,
        "ranges": {
            "step_s": plan.time_range(step),
            "mfu": plan.mfu and ends(plan.mfu, plan.speed_band),
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


def page(data: dict[str, Any]) -> str:
    """A self-contained page with charts: `page.js` draws `data`, which it embeds."""
    title = f"{data['model']} on {data['world']} x {data['hardware']}"
    return web_page(title, data, [Path(__file__).with_name("page.js")])
