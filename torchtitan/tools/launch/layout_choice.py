"""Layouts for a new project: searched, predicted and shown for a choice."""

import math
from collections.abc import Sequence

from torchtitan.config.derive import layout_name
from torchtitan.tools.launch.recipe import as_flags, draft_settings, steps_of
from torchtitan.tools.launch.request import Request
from torchtitan.tools.planner.planner import find_layouts, make_plan, nothing_fits
from torchtitan.tools.planner.proposals import Proposal
from torchtitan.tools.planner.render import likelihood, run_of
from torchtitan.tools.planner.search import SearchResult
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import (
    aligned,
    plural,
    show_duration,
    show_gib,
    show_rate,
    show_tokens,
)

SHOWN = 3
_FEW = 8
_SAVING = ("--optimizer.state_dtype=bfloat16", "--training.enable_cpu_offload=true")
"""Flags that lower memory on few GPUs, the faster first."""
_LEGEND = (
    "9 of 10 runs are within the ranges. Batch: rows at a time x times per step and rank\n"
    "(docs/guides/init.md)."
)


_HEADINGS = ["", "layout", "batch", "recomputes", "tokens/s per device", "GiB", "fits", "whole run"]


def best_layouts(request: Request) -> tuple[list[Proposal], int]:
    """The best layouts, best first, or the one that flags set; and how many were compared.

    Raises:
        UserError: no layout fits.
        ConfigError: no layout is legal.
    """
    if request.has_layout:
        plan = make_plan(as_flags(draft_settings(request)), request.devices, request.hardware)
        return [Proposal(plan, "as given")], 1
    search = find_layouts(
        as_flags(draft_settings(request)), request.devices, request.hardware, show_configured=False
    )
    if not search.best:
        reason = nothing_fits(search, request.devices, request.hardware)
        raise UserError(f"{request.model.name}: {reason}; {_what_would_fit(request, search)}")
    return search.best[:SHOWN], search.seen


def _what_would_fit(request: Request, search: SearchResult) -> str:
    """Advice for a model that doesn't fit."""
    if request.on_cpu:
        return "choose a smaller model or --seq-len"
    short = search.smallest_gib / request.hardware.usable_gib
    devices = request.devices * 2 ** math.ceil(math.log2(short * 1.1))
    changes = [f"--devices {devices} or more"]
    if request.devices <= _FEW:  # else each search takes long
        changes += [flag for flag in _SAVING if _fits_with(flag, request)]
    return f"try {', '.join(changes)}, or a smaller model or --seq-len"


def _fits_with(flag: str, request: Request) -> bool:
    argv = [*as_flags(draft_settings(request)), flag]
    try:
        search = find_layouts(argv, request.devices, request.hardware, show_configured=False)
    except ConfigError:
        return False
    return bool(search.best)


def table(proposals: Sequence[Proposal], seen: int, request: Request) -> str:
    """A table of the layouts with predictions and reasons."""
    rows = [_HEADINGS]
    for i, proposal in enumerate(proposals):
        plan = proposal.plan
        w = plan.workload
        batch = f"{plan.config.training.local_batch_size} x {w.accumulation}"
        tokens = float(steps_of(plan, request) * w.tokens_per_step)
        length = f"{show_duration(run_of(plan, tokens).hours * 3600)}, {show_tokens(tokens)}"
        schedule = f", {plan.schedule}" if plan.schedule else ""
        slow, fast = plan.speed_range
        least, most = plan.peak_range
        rows.append(
            [
                str(i + 1),
                layout_name(plan.layout) + schedule,
                batch,
                {"none": "nothing"}.get(plan.checkpointing, plan.checkpointing),
                f"{show_rate(plan.tokens_per_second)} ({show_rate(slow)}-{show_rate(fast)})",
                f"{plan.peak_gib:.1f} ({least:.1f}-{most:.1f})",
                likelihood(plan.chance_to_fit),
                length,
            ]
        )
    reasons = "\n".join(f"{i}: {proposal.why}" for i, proposal in enumerate(proposals, 1))
    memory = show_gib(request.hardware.usable_gib)
    hardware = f"{request.devices} x {request.hardware.name}, {memory} each"
    best = f"The best of {plural(seen, 'configuration')}" if seen > 1 else "The layout"
    return f"{best} on {hardware}:\n{aligned(rows)}\n{reasons}\n{_LEGEND}"
