"""How many GPUs a run needs: the best layout on each number of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.planner import find_layouts
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import TrainingRun, rounded, run_of, summary
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
            search = find_layouts(
                argv, world, hardware, axes, show_configured=False, only_best=True
            )
        except ConfigError as error:
            refused = error
        else:
            for proposal in search.best:  # one or none
                size = Size(proposal.plan, run_of(proposal.plan, tokens))
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


def sizes_data(sizes: Sizes, price: float | None = None) -> list[dict[str, Any]]:
    """The sizes, for JSON and the page.

    Args:
        price: of a GPU-hour.
    """
    return [
        summary(size.plan)
        | {
            "chosen": size is sizes.chosen,
            "tokens_per_second": size.plan.tokens_per_second * size.world,
            "tokens": size.run.tokens,
            "days": size.days,
            "range_days": size.plan.time_range(size.days),
            "gpu_hours": size.run.gpu_hours,
            "cost": size.run.gpu_hours * price if price else None,
        }
        for size in sizes.all
    ]


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "GPUs": ("world", "{:,}".format),
    "layout": ("layout", layout_name),
    "rows": ("global_batch_size", str),
    "tokens/s per GPU": ("tokens_per_second_per_gpu", show_rate),
    "tokens/s": ("tokens_per_second", show_rate),
    "GiB": ("peak_gib", "{:.1f}".format),
    "days": ("days", rounded),
    "GPU-hours": ("gpu_hours", rounded),
    "cost": ("cost", rounded),
}
"""Key in `sizes_data` and format of each column."""


def sizes_table(sizes: Sizes, price: float | None = None) -> str:
    """The sizes for a terminal. Arguments as for `sizes_data`."""
    columns = {name: column for name, column in _COLUMNS.items() if price or name != "cost"}
    rows = [
        [text(size[key]) for key, text in columns.values()] for size in sizes_data(sizes, price)
    ]
    chosen = sizes.chosen
    gpus = f"{chosen.world:,} x {chosen.plan.hardware.name}"
    answer = f"The fewest that fit: {gpus}"
    if sizes.days is not None:
        low, high = chosen.plan.time_range(chosen.days)
        answer = (
            f"The fewest that train {show_tokens(chosen.run.tokens)} tokens in {sizes.days:g} "
            f"days: {gpus}, {chosen.days:.3g} days ({low:.3g} to {high:.3g})"
        )
    return f"{aligned([[*columns], *rows])}\n{answer}"
