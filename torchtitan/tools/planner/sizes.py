"""How many GPUs a run needs: the best layout on each number of them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.planner.advice import wasteful
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.planner import find_layouts
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import TrainingRun, band_ends, rounded, run_of
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import aligned, show_rate, show_tokens

USUAL = 512
"""Powers of two up to this number of GPUs are always compared."""
MOST = 16_384
"""The largest number that is compared if smaller ones are too slow."""


@dataclass(frozen=True)
class Size:
    """The best plan on a number of GPUs."""

    plan: Plan
    run: TrainingRun

    @property
    def world(self) -> int:
        return self.plan.workload.world

    @property
    def days(self) -> float:
        return self.run.hours / 24


@dataclass(frozen=True)
class Sizes:
    """The best plans on 1, 2, 4, ... GPUs, as far as the model fits."""

    all: list[Size]
    chosen: Size
    """The fewest GPUs that are fast enough; without a limit, the fewest that the model fits on."""
    days: float | None
    """The limit."""


def compare_sizes(
    argv: list[str],
    hardware: Hardware,
    *,
    axes: tuple[str, ...] = (),
    tokens: float | None = None,
    days: float | None = None,
) -> Sizes:
    """Search for the best layout on each number of GPUs.

    Args:
        argv: configuration flags.
        axes: what the searches vary beside the layout.
        tokens: to train on. Default: those of `training.steps`.
        days: the time to do so.

    Raises:
        ConfigError: the trainer would refuse the configuration on any number of GPUs.
        UserError: it fits on none, or none is fast enough.
    """
    sizes: list[Size] = []
    chosen = None
    refused = None
    world = 1
    while world <= USUAL or (chosen is None and world <= MOST):
        try:
            search, notes = find_layouts(
                argv, world, hardware, axes, show_configured=False, only_best=True
            )
        except ConfigError as error:
            refused = error
        else:
            if search.best:
                plan = search.best[0].plan
                plan = dataclasses.replace(plan, notes=(*plan.notes, *notes, *wasteful(plan)))
                size = Size(plan, run_of(plan, tokens))
                sizes.append(size)
                if chosen is None and (days is None or size.days <= days):
                    chosen = size
        world *= 2
    if not sizes and refused is not None:
        raise refused
    if not sizes:
        raise UserError(
            f"nothing fits on up to {MOST:,} x {hardware.name}; use a smaller training.seq_len, or "
            "--axes loss_chunks,state_dtype,offload"
        )
    if chosen is None:
        best = min(sizes, key=lambda size: size.days)
        raise UserError(
            f"--days {days:g}: up to {MOST:,} x {hardware.name}, {show_tokens(best.run.tokens)} "
            f"tokens take {best.days:.3g} days at best, on {best.world:,}; raise it, or "
            "training.global_batch_size, which limits how many GPUs share a step"
        )
    return Sizes(sizes, chosen, days)


def sizes_table(sizes: Sizes, price: float | None = None) -> str:
    """The sizes for a terminal.

    Args:
        price: of a GPU-hour.
    """
    head = ["GPUs", "layout", "rows", "tokens/s per GPU", "tokens/s", "GiB", "days", "GPU-hours"]
    rows = [[*head, *(["cost"] if price else [])]]
    for size in sizes.all:
        plan = size.plan
        speed = plan.tokens_per_second
        cells = [
            f"{size.world:,}",
            layout_name(plan.layout),
            str(plan.config.training.global_batch_size),
            show_rate(speed),
            show_rate(speed * size.world),
            f"{plan.peak_gib:.1f}",
            rounded(size.days),
            rounded(size.run.gpu_hours),
        ]
        rows.append([*cells, *([rounded(size.run.gpu_hours * price)] if price else [])])
    tokens = show_tokens(sizes.chosen.run.tokens)
    gpus = f"{sizes.chosen.world:,} x {sizes.chosen.plan.hardware.name}"
    if sizes.days is None:
        answer = f"The fewest that fit: {gpus}"
    else:
        band = sizes.chosen.plan.speed_band
        ends = " to ".join(f"{n:.3g}" for n in band_ends(sizes.chosen.days, band, inverse=True))
        answer = (
            f"The fewest that train {tokens} tokens in {sizes.days:g} days: {gpus}, "
            f"{sizes.chosen.days:.3g} days ({ends})"
        )
    return f"{aligned(rows)}\n{answer}"


def sizes_data(sizes: Sizes, price: float | None = None) -> list[dict[str, Any]]:
    """The sizes, for JSON and the page."""
    return [
        {
            "world": size.world,
            "chosen": size is sizes.chosen,
            "fits": True,
            "layout": size.plan.layout,
            "global_batch_size": size.plan.config.training.global_batch_size,
            "tokens_per_second_per_gpu": size.plan.tokens_per_second,
            "tokens_per_second": size.plan.tokens_per_second * size.world,
            "peak_gib": size.plan.peak_gib,
            "tokens": size.run.tokens,
            "days": size.days,
            "range_days": band_ends(size.days, size.plan.speed_band, inverse=True),
            "gpu_hours": size.run.gpu_hours,
            "cost": size.run.gpu_hours * price if price else None,
        }
        for size in sizes.all
    ]
