"""The layout of a new project: the best by a search, or the one that flags set."""

import math
from dataclasses import replace

from torchtitan.config.derive import divisors, with_settings
from torchtitan.tools.launch.recipe import as_flags, draft_settings
from torchtitan.tools.launch.request import Request
from torchtitan.tools.planner.planner import find_layouts, make_plan, nothing_fits
from torchtitan.tools.planner.predict import Plan, replan
from torchtitan.tools.planner.proposals import Proposal
from torchtitan.tools.planner.search import LIKELY, SearchResult
from torchtitan.utils.errors import ConfigError, UserError

_FEW = 8
_SAVING = ("--optimizer.state_dtype=bfloat16", "--training.enable_cpu_offload=true")
"""Flags that lower memory on few GPUs, the faster first."""


def best_layout(request: Request) -> Proposal:
    """The best layout and the reason.

    Raises:
        UserError: no layout fits.
        ConfigError: no layout is legal.
    """
    flags = as_flags(draft_settings(request))
    if request.has_layout:
        return Proposal(make_plan(flags, request.devices, request.hardware), "as given")
    search = find_layouts(flags, request.devices, request.hardware, show_configured=False)
    if not search.best:
        reason = nothing_fits(search, request.devices, request.hardware)
        raise UserError(f"{request.model.name}: {reason}; {_what_would_fit(request, search)}")
    best = search.best[0]
    if request.on_cpu or "training.loss_chunks" in request.flag_settings:
        return best
    return replace(best, plan=_in_fewest_chunks(best.plan))


def _in_fewest_chunks(plan: Plan) -> Plan:
    """The plan with the loss in as few chunks as fit: each chunk costs a pass over the gradient of
    the output projection.
    """
    for chunks in divisors(plan.config.training.loss_chunks):
        whole = replan(plan, with_settings(plan.config, {"training.loss_chunks": chunks}))
        if whole and whole.chance_to_fit >= LIKELY:
            return whole
    return plan


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
