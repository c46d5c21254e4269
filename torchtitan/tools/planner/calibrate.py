"""Runs beside their plans, and hardware fitted to them."""

import socket
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.telemetry.planned import Figure, Taken, figures
from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import Hardware, hardware_with, load_hardware, to_table
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.planner.run_plan import planned
from torchtitan.tools.reports.folder import CONFIG, METRICS, read_events, read_folder
from torchtitan.tools.reports.plan import figure_rows, steady_records, taken_of
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
_MOST = 3.0
"""Factor by which a fit changes a constant at most."""
_CLOSE = 0.002
"""Relative error of the fitted plan's step at which the fit ends."""


# ---- a run


@dataclass(frozen=True)
class Measured:
    """What a run recorded."""

    folder: Path
    world: int
    hosts: tuple[str, ...]
    device: str
    """Its name in torch."""
    records: int
    tokens_per_second: float
    """Median per GPU."""
    taken: Taken
    """Medians, and the highest peak of memory."""


def read_run(folder: Path) -> Measured:
    """The last start of the run in a dump folder.

    Raises:
        UserError: it holds no run, or too few steps.
    """
    start = next(reversed(read_folder(folder).starts), None)
    try:
        records = list(read_records(folder / METRICS))
    except OSError:
        start = None
    if start is None or not start.ranks or not start.devices:
        raise UserError(
            f"--from-run: {folder} holds no run that can be read; name a job.dump_folder"
        )
    steady = steady_records(start, records)
    if not steady:
        raise UserError(
            f"--from-run: {folder} has no measurement after the first step; train longer"
        )
    return Measured(
        folder,
        start.ranks,
        tuple(start.hosts),
        next(iter(start.devices)),
        len(steady),
        tokens_per_second=statistics.median(r["tokens_per_second"] or 0.0 for r in steady),
        taken=taken_of(start, steady, read_events(folder)),
    )


def config_flag(run: Measured) -> str:
    """The flag that names a run's configuration."""
    file = run.folder / CONFIG
    if not file.is_file():
        raise UserError(f"--from-run: no {file}; name a job.dump_folder")
    return f"--job.config_file={file}"


def hardware_of(run: Measured) -> str:
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


def compared(run: Measured, plan: Plan) -> list[Figure]:
    """A run beside its plan."""
    speed = plan.tokens_per_second
    first = Figure("tokens/s per GPU", speed, run.tokens_per_second, plan.speed_range)
    return [first, *figures(planned(plan), run.taken)]


def comparison_text(run: Measured, plan: Plan) -> str:
    """A run beside its plan, for a terminal."""
    rows = figure_rows(compared(run, plan))
    head = f"{run.folder}: median of {plural(run.records, 'record')} on {run.world} x {run.device}"
    text = f"{head}\n{aligned(rows)}"
    if run.device == CPU:
        text += "\nPeak memory on a CPU is that of the process, which a plan doesn't know"
    return text


def comparison_data(run: Measured, plan: Plan) -> dict[str, Any]:
    """A run beside its plan, for JSON."""
    return {
        "folder": str(run.folder),
        "records": run.records,
        "device": run.device,
        "figures": {
            figure.name: {"measured": figure.measured, "planned": figure.planned}
            for figure in compared(run, plan)
        },
    }


# ---- fit


def fit(run: Measured, plan: Plan) -> Hardware:
    """The plan's hardware with rates that make the plan's step as long as the run's.

    All rates and the host's work are scaled alike, since one figure can't tell them apart. Time
    that the run waited for data doesn't count.
    """
    seconds = run.taken.step_s - run.taken.data_s
    factor = 1.0
    for _ in range(_ROUNDS):
        hardware = _faster(plan.hardware, factor)
        ratio = predict(plan.workload, plan.spec, hardware).time.seconds / seconds
        if abs(ratio - 1) < _CLOSE:
            break
        factor = min(_MOST, max(1 / _MOST, factor * ratio))
    return hardware


def _faster(hardware: Hardware, factor: float) -> Hardware:
    rates = {name: getattr(hardware, name) * factor for name in _RATES}
    host = {name: getattr(hardware, name) / factor for name in _HOST}
    return hardware.model_copy(update=rates | host)


def fitted_file(run: Measured, plan: Plan, name: str = "fitted") -> str:
    """The text of a file of hardware called `name`, whose constants are fitted to the run."""
    fitted = fit(run, plan)
    source = f"{run.folder}, {run.world} x {run.device}, {plan.config.model.label}"
    return to_table(
        name, fitted, plan.hardware, f"fitted to {source}; the rest as {plan.hardware.name}"
    )
