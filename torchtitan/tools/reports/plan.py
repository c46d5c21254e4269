"""A run beside the plan that its launcher made, which `run.json` keeps."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from torchtitan.telemetry.planned import Figure, Taken, figures, off_plan, seconds_waited
from torchtitan.tools.reports.folder import Start
from torchtitan.tools.reports.records import MetricsRecord


def plan_data(
    start: Start, records: Iterable[MetricsRecord], events: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The plan of a run's last start beside what it took; None if there is none, or no record after
    the first step.
    """
    planned = start.plan
    steady = steady_records(start, records)
    if planned is None or not steady:
        return None
    taken = taken_of(start, steady, events)
    if not planned.peak_gib:
        taken = taken._replace(peak_gib=None)
    return {
        "hardware": planned.hardware,
        "band": planned.band,
        "figures": [figure._asdict() for figure in figures(planned, taken)],
        "off": off_plan(planned, taken, least=0.0),
        "time_s": planned.time_s,
        "memory_gib": planned.memory_gib if planned.peak_gib else {},
    }


def steady_records(start: Start, records: Iterable[MetricsRecord]) -> list[dict[str, float | None]]:
    """Values of a start's training records after its first step, which compiles."""
    return [
        record.values
        for record in records
        if record.step > start.resumed_step + 1
        and (record.values.get("time") or 0.0) >= start.time
        and record.values.get("step_time_s")
    ]


def taken_of(
    start: Start, steady: Sequence[Mapping[str, float | None]], events: Sequence[Mapping[str, Any]]
) -> Taken:
    """What the steps of a start took: medians, and the highest peak of memory.

    Args:
        steady: from `steady_records`, one or more.
    """
    saves = sum(event["kind"] == "saved" and event["time"] >= start.time for event in events)
    return Taken(
        median(record["step_time_s"] or 0.0 for record in steady),
        median(seconds_waited(record) for record in steady),
        peak_gib=max(record.get("memory_gib") or 0.0 for record in steady),
        save_s=start.saves_s / saves if saves and start.saves_s is not None else None,
        state_gib=start.state_gib,
    )


def figure_rows(compared: Iterable[Figure]) -> list[list[str]]:
    """A table of planned and measured figures; the difference is the run's from the plan."""
    rows = [["", "planned", "range", "measured", "difference"]]
    for figure in compared:
        name, planned, measured, ends = figure
        digits = ",.0f" if max(planned or 0.0, measured or 0.0) >= 1000 else ".3g"
        expected, *ends_of_range, taken = [
            "-" if value is None else f"{value:{digits}}"
            for value in (planned, *(ends or ()), measured)
        ]
        cells = [expected, " to ".join(ends_of_range) or "-", taken]
        difference = "-" if figure.difference is None else f"{figure.difference:+.1%}"
        rows.append([name, *cells, f"{difference}, outside" if figure.outside else difference])
    return rows
