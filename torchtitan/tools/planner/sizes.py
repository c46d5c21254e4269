"""The number of GPUs that a run needs: the best layout on each number of them."""

from dataclasses import dataclass
from typing import Any

from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.planner import find_layouts
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import (
    FIGURES,
    TrainingRun,
    run_of,
    show_rounded,
    summary,
    wrap,
)
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import aligned, show_rate, show_tokens

DAYS = 30.0
"""A sensible time for a run, unless `--days` sets another."""
COMPARED_GPUS = 512
"""Powers of two up to this number of GPUs are always compared."""
MAX_GPUS = 16_384
"""The largest number that is compared if smaller ones are too slow."""


@dataclass(frozen=True)
class Size:
    """The best plan on a number of GPUs, and the run by it."""

    plan: Plan
    run: TrainingRun

    @property
    def days(self) -> float:
        return self.run.hours / 24


@dataclass(frozen=True)
class Sizes:
    """The best plans on 1, 2, 4, ... GPUs, as far as the model fits."""

    all: list[Size]
    pick: Size
    """The fewest GPUs that meet `days`, or else the fastest."""
    days: float | None
    """The limit that the user set."""

    def data(self) -> list[dict[str, Any]]:
        """The sizes, for JSON and the page."""
        return [
            summary(size.plan)
            | {
                "chosen": size is self.pick,
                "tokens_per_second": size.run.tokens / size.run.hours / 3600,
                "tokens": size.run.tokens,
                "days": size.days,
                "range_days": size.plan.time_range(size.days),
                "gpu_hours": size.run.gpu_hours,
            }
            for size in self.all
        ]

    def table(self) -> str:
        """The sizes and the answer, for a terminal."""
        names = ["layout", "tokens/s", "GiB"]
        rows = [["GPUs", "rows", *names, "all tokens/s", "days", "GPU-hours"]]
        for size, data in zip(self.all, self.data(), strict=True):
            figures = (FIGURES[name](size.plan) for name in names)
            totals = size.days, size.run.gpu_hours
            speed = show_rate(data["tokens_per_second"])
            rows.append([f"{data['world']:,}", str(data["global_batch_size"]), *figures, speed])
            rows[-1] += map(show_rounded, totals)
        return f"{aligned(rows)}\n{wrap(self._answer())}"

    def _answer(self) -> str:
        plan, run = self.pick.plan, self.pick.run
        limit = f"{self.days or DAYS:g} days"
        limit += "" if self.days else " (--days sets another limit)"
        task = f"{show_tokens(run.tokens)} tokens in {limit}"
        low, high = plan.time_range(self.pick.days)
        figures = (
            f"{plan.workload.world:,} x {plan.hardware.name}, {self.pick.days:.3g} days "
            f"({low:.3g} to {high:.3g}), {show_rounded(run.gpu_hours)} GPU-hours"
        )
        if self.pick.days <= (self.days or DAYS):
            return f"The fewest that train {task}: {figures}"
        return (
            f"None trains {task}, the fastest is {figures}. training.global_batch_size limits how "
            "many GPUs share a step"
        )


def compare_sizes(
    argv: list[str], hardware: Hardware, *, tokens: float | None = None, days: float | None = None
) -> Sizes:
    """Search for the best layout on each number of GPUs.

    Args:
        argv: configuration flags.
        tokens: to train on. Default: the tokens of `training.steps`.
        days: the time to do so.

    Raises:
        ConfigError: the trainer would refuse the configuration on any number of GPUs.
        UserError: it fits on none.
    """
    sizes: list[Size] = []
    in_time: list[Size] = []
    refusal = None
    world = 1
    while world <= COMPARED_GPUS or (not in_time and world <= MAX_GPUS):
        try:
            search = find_layouts(argv, world, hardware, show_configured=False, only_best=True)
        except ConfigError as error:
            refusal = error
        else:
            for plan in (proposal.plan for proposal in search.best):  # one or none
                sizes.append(Size(plan, run_of(plan, tokens)))
        in_time = [size for size in sizes if size.days <= (days or DAYS)]
        world *= 2
    if not sizes:
        raise refusal or UserError(
            f"nothing fits on up to {MAX_GPUS:,} x {hardware.name}; use a smaller "
            "training.seq_len, more training.loss_chunks, or optimizer.state_dtype bfloat16"
        )
    pick = in_time[0] if in_time else min(sizes, key=lambda size: size.days)
    return Sizes(sizes, pick, days)
