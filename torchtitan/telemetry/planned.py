"""What a run was planned to take, beside what it takes. Imports no torch.

Training knows no planner: the launcher plans, and gives the figures to the ranks in an environment
variable. `run.json` keeps them.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, ValidationError

from torchtitan.utils.wording import show_duration, show_gib, show_percent

ENV = "TORCHTITAN_PLAN"
"""Environment variable with a `Planned` as JSON."""
_OFF = 0.2
"""Relative difference from the plan that a run reports, or the plan's band if that is wider."""


class Planned(BaseModel):
    """Figures of the plan of a run."""

    model_config = ConfigDict(frozen=True)

    hardware: str
    devices: tuple[str, ...]
    """Names that torch reports for devices of this hardware."""
    step_s: PositiveFloat
    band: NonNegativeFloat
    """Relative error of `step_s` within which 90 % of such plans are."""
    peak_gib: PositiveFloat | None
    """Memory of the rank that needs most; None on a CPU, where none of a plan is measured."""
    save_s: NonNegativeFloat | None
    """Seconds that training waits for a save; None if it depends on the storage."""
    time_s: dict[str, float] = {}
    """Seconds of a step by what they are spent on."""
    memory_gib: dict[str, float] = {}
    """The peak by what it is for."""


class Taken(NamedTuple):
    """What a run took."""

    step_s: float
    """Seconds of a step, including `data_s`."""
    data_s: float
    """Seconds of a step that it waited for data."""
    peak_gib: float | None
    save_s: float | None = None
    """Seconds that training waited for a save; None if nothing was saved."""


class Figure(NamedTuple):
    """A planned figure beside the measured one; None if unknown."""

    name: str
    planned: float | None
    measured: float | None


def figures(planned: Planned, taken: Taken) -> list[Figure]:
    """A plan beside what the run took."""
    rows = [
        Figure("step, s", planned.step_s, taken.step_s),
        Figure("waiting for data, s", 0.0, taken.data_s),
        Figure("computing and communicating, s", planned.step_s, taken.step_s - taken.data_s),
        Figure("peak, GiB", planned.peak_gib, taken.peak_gib),
        Figure("a save, s", planned.save_s, taken.save_s),
    ]
    return [row for row in rows if row.measured is not None]


def seconds_waited(record: Mapping[str, Any]) -> float:
    """Seconds of each of a record's steps that were spent waiting for data."""
    return float((record.get("data_loading_pct") or 0) / 100 * (record.get("step_time_s") or 0))


def planned_for(device: str) -> Planned | None:
    """The plan that the launcher gave to this run; None if there is none for this device.

    Args:
        device: its name in torch.
    """
    try:
        planned = Planned.model_validate_json(os.environ.get(ENV, ""))
    except ValidationError:  # none, or of a launcher of another release
        return None
    return planned if device in planned.devices else None


def off_plan(planned: Planned, taken: Taken) -> str | None:
    """A sentence on steps or memory that are off their plan, and by which part; None if none is."""
    parts = []
    difference = taken.step_s - planned.step_s
    if abs(difference) > max(_OFF, planned.band) * planned.step_s:
        part = f"{show_duration(taken.step_s - taken.data_s)} computing and communicating"
        if taken.data_s > difference / 2 > 0:
            part = f"{show_duration(taken.data_s)} of each waiting for data"
        parts.append(
            f"steps take {show_duration(taken.step_s)} ({part}), "
            f"{_compared(difference / planned.step_s)} than the {show_duration(planned.step_s)} "
            f"planned for {planned.hardware}"
        )
    if planned.peak_gib and taken.peak_gib:
        more = taken.peak_gib / planned.peak_gib - 1
        if abs(more) > _OFF:
            parts.append(
                f"memory peaks at {show_gib(taken.peak_gib)}, {_compared(more)} than the "
                f"{show_gib(planned.peak_gib)} planned"
            )
    return f"Off its plan: {'; '.join(parts)}" if parts else None


def _compared(difference: float) -> str:
    return f"{show_percent(100 * abs(difference))} {'more' if difference > 0 else 'less'}"
