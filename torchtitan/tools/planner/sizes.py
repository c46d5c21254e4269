"""The number of GPUs that a run needs: the best layout on each number of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import layout_name
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.planner import find_layouts
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.render import TrainingRun, run_of, show_rounded, summary
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import aligned, show_rate, show_tokens

COMPARED_GPUS = 512
"""Powers of two up to this number of GPUs are always compared."""
MAX_GPUS = 16_384
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
    pick: Size
    """The fewest GPUs that meet `days`; without a limit, the fewest that the model fits on."""
    days: float | None
    """The limit."""


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
        UserError: it fits on none, or none is fast enough.
    """
    sizes: list[Size] = []
    pick = None
    refusal = None
    world = 1
    while world <= COMPARED_GPUS or (pick is None and world <= MAX_GPUS):
        try:
            search = find_layouts(argv, world, hardware, show_configured=False, only_best=True)
        except ConfigError as error:
            refusal = error
        else:
            for proposal in search.best:  # one or none
                size = Size(proposal.plan, run_of(proposal.plan, tokens))
                sizes.append(size)
                if pick is None and (days is None or size.days <= days):
                    pick = size
        world *= 2
    if not sizes and refusal is not None:
        raise refusal
    if not sizes:
        raise UserError(
            f"nothing fits on up to {MAX_GPUS:,} x {hardware.name}; use a smaller "
            "training.seq_len, more training.loss_chunks, or optimizer.state_dtype bfloat16"
        )
    if pick is None:
        best = min(sizes, key=lambda size: size.days)
        raise UserError(
            f"--days {days:g}: up to {MAX_GPUS:,} x {hardware.name}, "
            f"{show_tokens(best.run.tokens)} tokens take {best.days:.3g} days at best, on "
            f"{best.world:,}; raise it, or training.global_batch_size, which limits how "
            "many GPUs share a step"
        )
    return Sizes(sizes, pick, days)


def sizes_data(sizes: Sizes, price: float | None = None) -> list[dict[str, Any]]:
    """The sizes, for JSON and the page.

    Args:
        price: of a GPU-hour.
    """
    return [
        summary(size.plan)
        | {
            "chosen": size is sizes.pick,
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
    "days": ("days", show_rounded),
    "GPU-hours": ("gpu_hours", show_rounded),
    "cost": ("cost", show_rounded),
}
"""Key in `sizes_data` and format of each column."""


def sizes_table(sizes: Sizes, price: float | None = None) -> str:
    """The sizes for a terminal. Arguments as for `sizes_data`."""
    columns = {name: column for name, column in _COLUMNS.items() if price or name != "cost"}
    rows = [
        [text(size[key]) for key, text in columns.values()] for size in sizes_data(sizes, price)
    ]
    pick = sizes.pick
    gpus = f"{pick.world:,} x {pick.plan.hardware.name}"
    answer = f"The fewest that fit: {gpus}"
    if sizes.days is not None:
        low, high = pick.plan.time_range(pick.days)
        answer = (
            f"The fewest that train {show_tokens(pick.run.tokens)} tokens in {sizes.days:g} "
            f"days: {gpus}, {pick.days:.3g} days ({low:.3g} to {high:.3g})"
        )
    return f"{aligned([[*columns], *rows])}\n{answer}"
