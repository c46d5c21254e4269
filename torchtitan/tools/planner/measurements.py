"""Runs beside their plans."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import hardware_with, load_hardware
from torchtitan.tools.planner.memory import GIB
from torchtitan.tools.planner.predict import Plan, ends
from torchtitan.tools.reports.folder import CONFIG, METRICS, read_folder
from torchtitan.tools.reports.records import read_records
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import aligned, listed, plural

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


def comparison(run: RunMeasurements, plan: Plan) -> tuple[dict[str, Any], str]:
    """A run beside its plan, for JSON and for a terminal. Memory is rank 0's on both sides."""
    step = plan.time.seconds
    steps = plan.time_range(step)
    peak = None if run.device == CPU else plan.memory[0].reserved / GIB
    figures: dict[str, tuple[float | None, Sequence[float], float]] = {
        "tokens/s per GPU": (plan.tokens_per_second, plan.speed_range, run.tokens_per_second),
        "step, s": (step, steps, run.step_s),
        "waiting for data, s": (0.0, (), run.data_s),
        "computing and communicating, s": (step, steps, run.step_s - run.data_s),
        "peak memory, GiB": (peak, ends(peak, plan.memory_band) if peak else (), run.peak_gib),
    }
    data = {
        "folder": str(run.folder),
        "records": run.records,
        "device": run.device,
        "figures": {
            name: {"measured": measurement, "planned": prediction}
            for name, (prediction, _, measurement) in figures.items()
        },
    }
    rows = [["", "planned", "range", "measured", "difference"]]
    rows += [[name, *_cells(*figure)] for name, figure in figures.items()]
    head = f"{run.folder}: median of {plural(run.records, 'record')} on {run.world} x {run.device}"
    text = f"{head}\n{aligned(rows)}"
    if run.device == CPU:
        text += "\nPeak memory on a CPU is the whole process's, which no plan predicts"
    return data, text


def _cells(prediction: float | None, ends: Sequence[float], measurement: float) -> list[str]:
    """A figure in a table. The difference is relative to the plan.

    Args:
        prediction: None if the plan has none.
        ends: the range of 90 % of such runs.
    """
    digits = ",.0f" if max(prediction or 0.0, measurement) >= 1000 else ".3g"
    between = " to ".join(f"{end:{digits}}" for end in ends)
    difference = f"{measurement / prediction - 1:+.1%}" if prediction else "-"
    if ends and not ends[0] <= measurement <= ends[1]:
        difference += ", outside"
    plan = "-" if prediction is None else f"{prediction:{digits}}"
    return [plan, between or "-", f"{measurement:{digits}}", difference]
