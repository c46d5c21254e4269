"""Runs beside their plans, and hardware fitted to them."""

import json
import socket
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.telemetry.planned import Figure, Taken, figures, seconds_waited, state_gib
from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import Hardware, hardware_with, load_hardware, to_table
from torchtitan.tools.planner.planner import make_plan
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.planner.run_plan import planned
from torchtitan.tools.reports.folder import read_events
from torchtitan.tools.reports.plan import figure_rows
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
    try:
        start = json.loads((folder / "run.json").read_bytes())["starts"][-1]
        saved = _seconds_per_save(folder, start)
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        records = [record for record in map(json.loads, lines) if "tokens_per_second" in record]
        world = int(start["ranks"])
        devices = list(start["devices"])
        hosts = tuple(start.get("hosts", ()))
        first = int(start["resumed_step"]) + 1
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"--from-run: {folder} holds no run that can be read ({error}); name a job.dump_folder"
        ) from None
    steady = [record for record in records if record["step"] > first]  # the first step compiles
    if not steady:
        raise UserError(
            f"--from-run: {folder} has no measurement after the first step; train longer"
        )
    return Measured(
        folder,
        world,
        hosts,
        devices[0],
        len(steady),
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in steady),
        taken=Taken(
            statistics.median(record["step_time_s"] for record in steady),
            statistics.median(seconds_waited(record) for record in steady),
            peak_gib=max(record["memory_gib"] for record in records),
            save_s=saved,
            state_gib=state_gib(start.get("state_bytes", {})),
        ),
    )


def _seconds_per_save(folder: Path, start: dict[str, Any]) -> float | None:
    """Seconds that training waited for a save of this start; None without one."""
    events = read_events(folder)
    saves = sum(e["kind"] == "saved" and e["time"] >= start["time"] for e in events)
    return start["seconds"]["saves"] / saves if saves else None


def _config(folder: Path) -> str:
    if not (folder / "config.toml").is_file():
        raise UserError(f"--from-run: no {folder / 'config.toml'}; name a job.dump_folder")
    return f"--job.config_file={folder / 'config.toml'}"


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


def plan_run(run: Measured, flags: list[str], hardware: Hardware) -> Plan:
    """The plan of what the run did.

    Args:
        flags: override the run's configuration.
    """
    return make_plan([_config(run.folder), *flags], run.world, hardware)


# ---- comparison


def compared(run: Measured, plan: Plan) -> list[Figure]:
    """A run beside its plan."""
    rate, band = plan.tokens_per_second, plan.speed_band
    speed = (rate * (1 - band), rate * (1 + band))
    first = Figure("tokens/s per GPU", rate, run.tokens_per_second, speed)
    return [first, *figures(planned(plan), run.taken)]


def comparison_text(run: Measured, plan: Plan) -> str:
    """A run beside its plan, for a terminal."""
    rows = figure_rows(compared(run, plan))
    head = f"{run.folder}: median of {plural(run.records, 'record')} on {run.world} x {run.device}"
    notes = []
    if run.device == "cpu":
        notes.append("Peak memory on a CPU is that of the process, which a plan doesn't know")
    return "\n".join([head, aligned(rows), *notes])


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
    hardware = plan.hardware
    seconds = run.taken.step_s - run.taken.data_s
    for _ in range(_ROUNDS):
        ratio = predict(plan.workload, plan.spec, hardware).time.seconds / seconds
        if abs(ratio - 1) < _CLOSE:
            break
        scaled = {name: getattr(hardware, name) * ratio for name in _RATES}
        for name in _HOST:
            scaled[name] = getattr(hardware, name) / ratio
        limited = {}
        for name, value in scaled.items():
            original = getattr(plan.hardware, name)
            limited[name] = min(original * _MOST, max(original / _MOST, value))
        hardware = hardware.model_copy(update=limited)
    return hardware


def fitted_file(run: Measured, plan: Plan, name: str = "fitted") -> str:
    """The text of a file of hardware called `name`, whose constants are fitted to the run."""
    fitted = fit(run, plan)
    source = f"{run.folder}, {run.world} x {run.device}, {plan.config.model.label}"
    return to_table(
        name, fitted, plan.hardware, f"fitted to {source}; the rest as {plan.hardware.name}"
    )
