"""The layouts that a new project can choose from."""

import math
from collections.abc import Sequence

from torchtitan.config.derive import layout_name
from torchtitan.tools.launch.recipe import as_flags, draft, steps_of
from torchtitan.tools.launch.request import Request
from torchtitan.tools.planner.planner import find_layouts, make_plan, nothing_fits
from torchtitan.tools.planner.proposals import Proposal
from torchtitan.tools.planner.render import band_ends, likelihood, run_of
from torchtitan.utils.errors import UserError
from torchtitan.utils.text import aligned, plural, show_duration, show_gib, show_rate, show_tokens

SHOWN = 3
_LEGEND = (
    "9 of 10 runs are within the ranges. Batch: rows at a time x times per step and rank "
    "(docs/guides/init.md)."
)


_HEADINGS = [
    "",
    "layout",
    "batch",
    "recomputes",
    "tokens/s per device",
    "GiB",
    "fits",
    "whole run, tokens",
    "why",
]


def best_layouts(request: Request) -> tuple[list[Proposal], int]:
    """The best layouts, or the given one, recommended first, and the number of legal ones.

    Raises:
        UserError: none fits.
        ConfigError: none is legal.
    """
    if request.states_layout:
        plan, _ = make_plan(as_flags(draft(request)), request.devices, request.hardware)
        return [Proposal(plan, "as given")], 1
    found, _ = find_layouts(as_flags(draft(request)), request.devices, request.hardware, own=False)
    if not found.best:
        short = found.smallest_gib / request.hardware.usable_gib
        devices = request.devices * 2 ** math.ceil(math.log2(short * 1.1))
        more = f"try --devices {devices} or more, or a smaller model or --seq-len"
        if request.on_cpu:
            more = "choose a smaller model or --seq-len"
        reason = nothing_fits(found, request.devices, request.hardware)
        raise UserError(f"{request.model.name}: {reason}; {more}")
    return found.best[:SHOWN], found.seen


def table(
    proposals: Sequence[Proposal],
    seen: int,
    request: Request,
) -> str:
    """The layouts with their predictions and reasons."""
    rows = [_HEADINGS]
    for i, proposal in enumerate(proposals):
        plan = proposal.plan
        w = plan.workload
        batch = f"{plan.config.training.local_batch_size} x {w.accumulation}"
        tokens = float(steps_of(plan, request) * w.tokens_per_step)
        length = f"{show_duration(run_of(plan, tokens).hours * 3600)}, {show_tokens(tokens)}"
        schedule = f", {plan.schedule}" if plan.schedule else ""
        slow, fast = band_ends(plan.tokens_per_second, plan.speed_band)
        least, most = band_ends(plan.peak_gib, plan.memory_band)
        rows.append(
            [
                str(i + 1),
                layout_name(plan.layout) + schedule,
                batch,
                {"none": "nothing"}.get(plan.checkpointing, plan.checkpointing),
                f"{show_rate(plan.tokens_per_second)} ({show_rate(slow)} to {show_rate(fast)})",
                f"{plan.peak_gib:.1f} ({least:.1f} to {most:.1f})",
                likelihood(plan.chance_to_fit),
                length,
                proposal.why,
            ]
        )
    memory = show_gib(request.hardware.usable_gib)
    hardware = f"{request.devices} x {request.hardware.name}, {memory} each"
    best = f"The best of {plural(seen, 'legal layout')}" if seen > 1 else "The layout"
    return f"{best} on {hardware}:\n{aligned(rows)}\n{_LEGEND}"
