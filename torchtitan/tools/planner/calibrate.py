"""Runs beside their plans, and hardware fitted to them."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import Hardware, hardware_with, load_hardware, to_table
from torchtitan.tools.planner.memory import GIB
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.reports.folder import CONFIG, METRICS, read_folder
from torchtitan.tools.reports.records import read_records
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import aligned, listed, plural

_RATES = (
    *("gemm_bf16", "gemm_fp8", "gemm_fp8_rowwise", "attention"),
    *("memory_efficiency", "link_efficiency", "network_efficiency"),
)
"""Constants that a step's time is inversely proportional to."""
_HOST = ("step_overhead", "host_launch")
"""Constants of the host's work."""
_ROUNDS = 20
_MAX_FACTOR = 3.0
"""Factor by which a fit changes a constant at most."""
_TOLERANCE = 0.002
"""Relative error of the fitted plan's step at which the fit ends."""


# ---- a run


@dataclass(frozen=True)
class RunMeasurements:
    """A run's measurements: medians, and the highest peak of memory."""

    folder: Path
    world: int
    hosts: tuple[str, ...]
    device: str
    """Its name in torch."""
    records: int
    tokens_per_second: float
    """Per GPU."""
    step_s: float
    """Seconds of a step, including `data_s`."""
    data_s: float
    """Seconds of a step spent waiting for data."""
    peak_gib: float
    """Rank 0's; on a CPU, the memory of the whole process."""


def read_run(folder: Path) -> RunMeasurements:
    """The last start of the run in a dump folder, without its first step, which compiles.

    Raises:
        UserError: it holds no run, or too few steps.
    """
    start = read_folder(folder).last_start
    try:
        records = list(read_records(folder / METRICS))
    except OSError:
        start = None
    if start is None or not start.ranks or not start.devices:
        raise UserError(
            f"--from-run: {folder} holds no run that can be read; name a job.dump_folder"
        )
    measurements = [
        record.values
        for record in records
        if record.step > start.resumed_step + 1
        and (record.values.get("time") or 0.0) >= start.time
        and record.values.get("step_time_s")
    ]
    if not measurements:
        raise UserError(
            f"--from-run: {folder} has no measurement after the first step; train longer"
        )
    return RunMeasurements(
        folder,
        start.ranks,
        tuple(start.hosts),
        next(iter(start.devices)),
        records=len(measurements),
        tokens_per_second=median(record["tokens_per_second"] or 0.0 for record in measurements),
        step_s=median(record["step_time_s"] or 0.0 for record in measurements),
        data_s=median(_seconds_waited(record) for record in measurements),
        peak_gib=max(record.get("memory_gib") or 0.0 for record in measurements),
    )


def _seconds_waited(record: Mapping[str, float | None]) -> float:
    return (record.get("data_loading_pct") or 0.0) / 100 * (record["step_time_s"] or 0.0)


def config_flag(run: RunMeasurements) -> str:
    """The flag that names a run's configuration."""
    file = run.folder / CONFIG
    if not file.is_file():
        raise UserError(f"--from-run: no {file}; name a job.dump_folder")
    return f"--job.config_file={file}"


def hardware_of(run: RunMeasurements) -> str:
    """The name of the built-in hardware whose device the run reports, or `cpu`.

    Raises:
        ConfigError: there is none, or it is the CPU of another machine.
    """
    if hardware := hardware_with(run.device):
        return hardware.name
    problem = f"the run's device, {run.device}, is in no table"
    if run.device == CPU:
        if socket.gethostname() in run.hosts:
            return CPU
        problem = f"the run was on the CPU of {listed(run.hosts, 4)}, and this is another machine"
    raise ConfigError(
        [f"--hardware: {problem}; name the nearest of {', '.join(load_hardware())}, or a TOML file"]
    )


# ---- comparison


class Figure(NamedTuple):
    """A planned figure beside the measured one."""

    name: str
    prediction: float | None
    """None if the plan has no such figure."""
    measurement: float
    range: Sequence[float] | None
    """Lowest and highest figure of 90 % of such runs; None if the plan states no range."""

    def row(self) -> list[str]:
        """The cells of a table's row; the difference is relative to the plan."""
        digits = ",.0f" if max(self.prediction or 0.0, self.measurement) >= 1000 else ".3g"
        prediction, measurement = (
            "-" if value is None else f"{value:{digits}}"
            for value in (self.prediction, self.measurement)
        )
        ends = " to ".join(f"{end:{digits}}" for end in self.range or ())
        difference = f"{self.measurement / self.prediction - 1:+.1%}" if self.prediction else "-"
        if self.range and not self.range[0] <= self.measurement <= self.range[1]:
            difference += ", outside"
        return [self.name, prediction, ends or "-", measurement, difference]


def figures(run: RunMeasurements, plan: Plan) -> list[Figure]:
    """A run beside its plan. Memory is rank 0's on both sides."""
    step = plan.time.seconds
    steps = plan.time_range(step)
    peak = None if run.device == CPU else plan.memory[0].reserved / GIB
    band = plan.memory_band
    peaks = None if peak is None else (peak * (1 - band), peak * (1 + band))
    computing = run.step_s - run.data_s
    return [
        Figure("tokens/s per GPU", plan.tokens_per_second, run.tokens_per_second, plan.speed_range),
        Figure("step, s", step, run.step_s, steps),
        Figure("waiting for data, s", 0.0, run.data_s, None),
        Figure("computing and communicating, s", step, computing, steps),
        Figure("peak memory, GiB", peak, run.peak_gib, peaks),
    ]


def comparison_text(run: RunMeasurements, plan: Plan) -> str:
    """A run beside its plan, for a terminal."""
    head = f"{run.folder}: median of {plural(run.records, 'record')} on {run.world} x {run.device}"
    rows = [["", "planned", "range", "measured", "difference"]]
    rows += [figure.row() for figure in figures(run, plan)]
    text = f"{head}\n{aligned(rows)}"
    if run.device == CPU:
        text += "\nPeak memory on a CPU is the whole process's, which no plan predicts"
    return text


def comparison_data(run: RunMeasurements, plan: Plan) -> dict[str, Any]:
    """A run beside its plan, for JSON."""
    return {
        "folder": str(run.folder),
        "records": run.records,
        "device": run.device,
        "figures": {
            figure.name: {"measured": figure.measurement, "planned": figure.prediction}
            for figure in figures(run, plan)
        },
    }


# ---- fit


def fit(run: RunMeasurements, plan: Plan) -> Hardware:
    """The plan's hardware with rates that make the plan's step as long as the run's.

    All rates and the host's work are scaled alike, since one figure can't separate them. Time
    spent waiting for data is excluded.
    """
    seconds = run.step_s - run.data_s
    factor = 1.0
    for _ in range(_ROUNDS):
        hardware = _scale_rates(plan.hardware, factor)
        ratio = predict(plan.workload, plan.spec, hardware).time.seconds / seconds
        if abs(ratio - 1) < _TOLERANCE:
            break
        factor = min(_MAX_FACTOR, max(1 / _MAX_FACTOR, factor * ratio))
    return hardware


def _scale_rates(hardware: Hardware, factor: float) -> Hardware:
    rates = {name: getattr(hardware, name) * factor for name in _RATES}
    host = {name: getattr(hardware, name) / factor for name in _HOST}
    return hardware.model_copy(update=rates | host)


def fitted_file(run: RunMeasurements, plan: Plan) -> str:
    """The text of a hardware file whose constants are fitted to the run."""
    source = f"{run.folder}, {run.world} x {run.device}, {plan.model}"
    return to_table(
        "fitted",
        fit(run, plan),
        plan.hardware,
        f"fitted to {source}; the rest as {plan.hardware.name}",
    )
