"""What a run was planned to take, beside what it takes. Imports no torch.

Training knows no planner: the launcher plans, and gives the figures to the ranks in an environment
variable. `run.json` keeps them.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, ValidationError

from torchtitan.utils.wording import show_duration, show_gib, show_percent

ENV = "TORCHTITAN_PLAN"
"""Environment variable with a `Planned` as JSON."""
STATE = ("parameters", "gradients", "optimizer")
"""Parts of the memory that a run knows to the byte; `optimizer` includes the weights' average."""
_OFF = 0.2
"""Relative difference from the plan that a run reports, if it is outside the plan's range too."""
_WIDEST = 0.9
"""Band of the slowest step's range: a host that is late may make the band any wider."""


class Planned(BaseModel):
    """Figures of the plan of a run."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    hardware: str
    devices: tuple[str, ...]
    """Names that torch reports for devices of this hardware."""
    step_s: PositiveFloat
    band: NonNegativeFloat
    """Relative error of the throughput within which 90 % of such plans are."""
    peak_gib: PositiveFloat | None
    """Memory of rank 0, whose memory a run records; None on a CPU, where it is not measured."""
    memory_band: NonNegativeFloat
    """Relative error of `peak_gib` within which 90 % of such plans are."""
    save_s: NonNegativeFloat | None
    """Seconds that training waits for a save; None if it depends on the storage."""
    time_s: dict[str, float] = {}
    """Seconds of a step by what they are spent on."""
    memory_gib: dict[str, float] = {}
    """Memory of rank 0 by what it is for."""


class Taken(NamedTuple):
    """What a run took."""

    step_s: float
    """Seconds of a step, including `data_s`."""
    data_s: float
    """Seconds of a step that it waited for data."""
    peak_gib: float | None
    save_s: float | None = None
    """Seconds that training waited for a save; None if nothing was saved."""
    state_gib: Mapping[str, float] | None = None
    """Memory of each part of `STATE` on rank 0."""


class Figure(NamedTuple):
    """A planned figure beside the measured one; None if unknown."""

    name: str
    planned: float | None
    measured: float | None
    range: Sequence[float] | None = None
    """Lowest and highest figure of 90 % of such runs."""

    @property
    def difference(self) -> float | None:
        """Of the measured figure from the planned one, relative to that."""
        if not self.planned or self.measured is None:
            return None
        return self.measured / self.planned - 1

    @property
    def outside(self) -> bool:
        """Whether the measured figure is outside the range."""
        if self.range is None or self.measured is None:
            return False
        lowest, highest = self.range
        return not lowest <= self.measured <= highest


def figures(planned: Planned, taken: Taken) -> list[Figure]:
    """A plan beside what the run took. Memory is that of rank 0 on both sides."""
    step, band = planned.step_s, planned.band
    steps = (step / (1 + band), step / (1 - min(band, _WIDEST)))
    state = taken.state_gib or {}
    known = [(part, planned.memory_gib.get(part), state[part]) for part in STATE if part in state]
    rows = [
        Figure("step, s", step, taken.step_s, steps),
        Figure("waiting for data, s", 0.0, taken.data_s),
        Figure("computing and communicating, s", step, taken.step_s - taken.data_s, steps),
        *(_memory(f"{part}, GiB", expected, gib, planned) for part, expected, gib in known),
        _memory("peak memory, GiB", planned.peak_gib, taken.peak_gib, planned),
    ]
    if state and planned.peak_gib and taken.peak_gib:
        expected = planned.peak_gib - sum(planned.memory_gib.get(part, 0.0) for part in state)
        others = taken.peak_gib - sum(state.values())
        # The state follows from the configuration, so all that the peak may be off is here.
        name = "activations and others, GiB"
        rows.append(_memory(name, expected, others, planned, of=planned.peak_gib))
    rows.append(Figure("a save, s", planned.save_s, taken.save_s))
    return [row for row in rows if row.measured is not None]


def _memory(
    name: str,
    expected: float | None,
    measured: float | None,
    planned: Planned,
    of: float | None = None,
) -> Figure:
    """A figure that may be off by the plan's band of `of`, by default of itself."""
    if expected is None:
        return Figure(name, expected, measured)
    error = planned.memory_band * (of or expected)
    return Figure(name, expected, measured, (expected - error, expected + error))


def state_gib(state_bytes: Mapping[str, int]) -> dict[str, float]:
    """`Taken.state_gib` from what `run.json` says of a start."""
    return {part: state_bytes[part] / 2**30 for part in STATE if part in state_bytes}


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


def off_plan(planned: Planned, taken: Taken, least: float = _OFF) -> str | None:
    """A sentence on steps or memory that are outside their range, and by which part; None if none
    is.

    Args:
        least: relative difference from the plan from which it is said.
    """
    step, *others = figures(planned, taken)
    parts = [
        f"{each.name.removesuffix(', GiB')} {show_gib(each.measured or 0.0)}, "
        f"{_compared(each)} than the {show_gib(each.planned or 0.0)} planned"
        for each in others
        if each.name.endswith("GiB") and _is_off(each, least)
    ]
    if _is_off(step, least):
        part = f"{show_duration(taken.step_s - taken.data_s)} computing and communicating"
        if taken.data_s > (taken.step_s - planned.step_s) / 2 > 0:
            part = f"{show_duration(taken.data_s)} of each waiting for data"
        parts.insert(
            0,
            f"steps take {show_duration(taken.step_s)} ({part}), {_compared(step)} than the "
            f"{show_duration(planned.step_s)} planned for {planned.hardware}",
        )
    return f"Off its plan: {'; '.join(parts)}" if parts else None


def _is_off(figure: Figure, least: float) -> bool:
    return figure.outside and abs(figure.difference or 0.0) > least


def _compared(figure: Figure) -> str:
    difference = figure.difference or 0.0
    return f"{show_percent(100 * abs(difference))} {'more' if difference > 0 else 'less'}"
