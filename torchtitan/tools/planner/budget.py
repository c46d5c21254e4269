"""Days and cost of a run when GPUs fail: its goodput and best checkpoint interval.

Failures are independent and equally likely at any time. A run of n GPUs then fails every M = mtbf /
n on average, and an interval tau of training between checkpoints lasts, with repeated work and
restarts,

    M exp((R + W) / M) (exp((tau + d) / M) - 1)

where a save blocks training for d, a checkpoint is complete W after that, and a restart lasts R
(Daly 2006, doi:10.1016/j.future.2004.11.016, eq. 20, with W = 0: work that is trained while a
checkpoint is written is lost like the time of a restart).
"""

import math
from dataclasses import dataclass

from torchtitan.tools.planner.memory import GIB
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import TrainingRun, run_of, show_rounded
from torchtitan.tools.planner.saves import Saves, saves_of
from torchtitan.utils.wording import plural, show_duration, show_gib, show_percent, show_tokens


@dataclass(frozen=True)
class Failures:
    """The frequency of failures, and the cost of a restart."""

    mtbf_hours: float
    """Mean time between failures of one GPU, with its share of everything else that stops a run."""
    storage: float
    """Bytes/s at which all ranks together write a checkpoint."""
    restart_minutes: float


@dataclass(frozen=True)
class Goodput:
    """Share of a run's time spent on training that no failure undoes."""

    mtbf: float
    """Seconds between failures of the run."""
    saves: Saves
    interval_steps: int
    """The best interval."""
    share: float
    """Goodput at the best interval."""
    own_steps: int | None
    """`checkpoint.interval`; None if the configuration saves nothing."""
    own_share: float | None


def best_interval(blocked: float, mtbf: float) -> float:
    """Seconds of training between saves that lose least (Young 1974, doi:10.1145/361147.361115:
    sqrt(2 d M); with Daly's next terms, eq. 37).
    """
    if blocked >= 2 * mtbf:
        return mtbf
    ratio = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked


def goodput_at(interval: float, saves: Saves, mtbf: float, restart: float) -> float:
    """Goodput with `interval` seconds of training between saves."""
    if (interval + saves.blocked + restart + saves.background) / mtbf > 500:
        return 0.0
    duration = (
        math.exp((restart + saves.background) / mtbf)
        * math.expm1((interval + saves.blocked) / mtbf)
        * mtbf
    )
    return interval / duration


def goodput(plan: Plan, failures: Failures) -> Goodput:
    """The best checkpoint interval of a plan and its goodput, beside the configured interval's."""
    mtbf = failures.mtbf_hours * 3600 / plan.workload.world
    restart = failures.restart_minutes * 60
    step = plan.time.seconds
    checkpoint = plan.config.checkpoint
    saves = saves_of(plan, failures.storage)
    # A save starts only after the one before is complete.
    best = max(best_interval(saves.blocked, mtbf), saves.background)
    steps = max(1, math.ceil(best / step))

    def share(steps: int) -> float:
        return goodput_at(max(steps * step, saves.background), saves, mtbf, restart)

    configured_steps = checkpoint.interval if checkpoint.enable else None
    return Goodput(
        mtbf,
        saves,
        steps,
        share(steps),
        own_steps=configured_steps,
        own_share=share(configured_steps) if configured_steps else None,
    )


@dataclass(frozen=True)
class Budget:
    """Time and cost of a run."""

    run: TrainingRun
    """The run without failures."""
    goodput: Goodput | None
    hours: float
    """Duration with failures, at the best interval."""
    gpu_hours: float
    cost: float | None
    """Cost in the currency of the price."""


def budget_of(
    plan: Plan, tokens: float | None, failures: Failures | None, price: float | None
) -> Budget:
    """Time and cost of training on `tokens`; by default on the tokens of `training.steps`.

    Args:
        price: of a GPU-hour.
    """
    run = run_of(plan, tokens)
    estimate = goodput(plan, failures) if failures else None
    share = estimate.share if estimate else 1.0
    hours = run.hours / share if share else math.inf
    gpu_hours = hours * plan.workload.world
    return Budget(
        run, estimate, hours, gpu_hours, cost=None if price is None else price * gpu_hours
    )


def budget_text(budget: Budget, plan: Plan, failures: Failures | None, price: float | None) -> str:
    """A budget for a terminal."""
    lines = []
    if (goodput := budget.goodput) and failures:
        saves = goodput.saves
        world = plan.workload.world
        at_interval = (
            f"; {show_percent(100 * goodput.own_share)} at checkpoint.interval = "
            f"{goodput.own_steps}"
            if goodput.own_share is not None
            else "; the configuration saves nothing (checkpoint.enable = false)"
        )
        lines += [
            f"Failures: one every {show_duration(goodput.mtbf)} on {plural(world, 'GPU')} (each "
            f"GPU: {failures.mtbf_hours:,.0f} hours); {failures.restart_minutes:g} minutes to "
            "restart",
            f"Checkpoints of {show_gib(saves.size / GIB)}: each blocks for "
            f"{show_duration(saves.blocked)}, and is complete {show_duration(saves.background)} "
            "later",
            f"Goodput {show_percent(100 * goodput.share)} at the best interval, "
            f"{plural(goodput.interval_steps, 'step')} = "
            f"{show_duration(goodput.interval_steps * plan.time.seconds)}{at_interval}",
        ]
    cost = "" if budget.cost is None else f", {show_rounded(budget.cost)} at {price:g} per GPU-hour"
    condition = " with failures" if budget.goodput else ""
    lines.append(
        f"{show_tokens(budget.run.tokens)} tokens{condition}: "
        f"{show_duration(budget.hours * 3600)}, {show_rounded(budget.gpu_hours)} GPU-hours{cost}"
    )
    return "\n".join(lines)
