"""What `lr_scheduler.name` stands for, and how a schedule that is longer than the run is cut.

name                    decay_ratio               decay_type
linear, sqrt, cosine    every step after warm-up  the name
wsd                     as given, default 0.2     as given, default linear
constant                0
unset                   as given, default every   as given, default linear
                        step after warm-up
"""

from collections.abc import Iterator
from typing import Any

from torchtitan.config.sections.schema import Config

Derived = tuple[str, Any, str]
"""(key, value, formula)."""

SHAPES = ("linear", "sqrt", "cosine")
_WSD_DECAY = 0.2
"""As in Hägele et al., arXiv:2405.18392."""


def _total_steps(config: Config, world: int) -> Derived | None:
    if config.lr_scheduler.total_steps is not None:
        return None
    return "lr_scheduler.total_steps", config.training.steps, "training.steps"


def _warmup(config: Config, world: int) -> Derived | None:
    s = config.lr_scheduler
    if s.total_steps is None or s.warmup_steps <= s.total_steps:
        return None
    return (
        "lr_scheduler.warmup_steps",
        s.total_steps,
        f"{s.warmup_steps} cut to total_steps {s.total_steps}",
    )


def _decay_type(config: Config, world: int) -> Derived | None:
    s = config.lr_scheduler
    if s.decay_type is not None:
        return None
    if s.name in SHAPES:
        return "lr_scheduler.decay_type", s.name, "lr_scheduler.name"
    return (
        ("lr_scheduler.decay_type", "linear", "the default shape")
        if s.name in (None, "wsd")
        else None
    )


def _decay_ratio(config: Config, world: int) -> Derived | None:
    s = config.lr_scheduler
    if s.decay_ratio is not None or s.name not in ("wsd", "constant"):
        return None
    return (
        "lr_scheduler.decay_ratio",
        _WSD_DECAY if s.name == "wsd" else 0.0,
        f"lr_scheduler.name {s.name}",
    )


def _decay_after_warmup(config: Config, world: int) -> Derived | None:
    """A short run of a long schedule, as by `--training.steps 10`, has fewer steps to decay in."""
    s = config.lr_scheduler
    if s.decay_ratio is None or s.total_steps is None:
        return None
    left = s.total_steps - s.warmup_steps
    if round(s.total_steps * s.decay_ratio) <= left:
        return None
    text = (
        f"{s.decay_ratio:g} cut to {left} steps, which {s.warmup_steps} warmup_steps leave "
        f"of {s.total_steps}"
    )
    return "lr_scheduler.decay_ratio", left / s.total_steps, text


DERIVED = (_total_steps, _warmup, _decay_type, _decay_ratio, _decay_after_warmup)


def cuts(given: Config, formulas: dict[str, str], sources: dict[str, str]) -> Iterator[str]:
    """A warning for each given value that the length of the schedule cut.

    Args:
        given: before values were derived.
        formulas, sources: as in `Resolved`.
    """
    for key, value in {
        "warmup_steps": given.lr_scheduler.warmup_steps,
        "decay_ratio": given.lr_scheduler.decay_ratio,
    }.items():
        name = f"lr_scheduler.{key}"
        if value is not None and name in formulas:
            where = sources.get(name, "default")
            yield f"{name if where == f'--{name}' else f'{where}: {name}'}: {formulas[name]}"


def keys_agree(config: Config, world: int) -> Iterator[str]:
    """Keys that `lr_scheduler.name` rules out. Values that it stands for are accepted:
    `config.toml` has them.
    """
    s = config.lr_scheduler
    if s.name is None or s.name == "wsd":
        return
    name = f'lr_scheduler.name = "{s.name}"'
    if s.name in SHAPES:
        if s.decay_type != s.name:
            yield (
                f'lr_scheduler.decay_type: "{s.decay_type}" contradicts {name}; remove '
                "one of the two, or set "
                'lr_scheduler.name = "wsd"'
            )
        if s.decay_ratio is not None:
            yield (
                f"lr_scheduler.decay_ratio: {name} decays from the end of warm-up on; "
                "remove decay_ratio, or set "
                f'lr_scheduler.name = "wsd" and decay_type = "{s.name}"'
            )
        return
    what = "never decays" if s.name == "constant" else "has a decay of its own"
    asked = {"decay_ratio": s.decay_ratio or None, "decay_type": s.decay_type}
    if s.name == "constant":
        asked["min_lr_factor"] = s.min_lr_factor or None
    for key, value in asked.items():
        if value is not None:
            yield (
                f'lr_scheduler.{key}: {name} {what}; remove {key}, or set lr_scheduler.name = "wsd"'
            )
