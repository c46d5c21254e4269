"""A run's own measurements against its plan, and hardware constants fitted to them."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config import load_config
from torchtitan.tools.planner.hardware import Hardware, load_hardware, to_table
from torchtitan.tools.planner.planner import make_plan
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.planner.profile import (
    ATTENTION,
    COMMUNICATION,
    POINTWISE,
    PRODUCTS,
    planned_parts,
    traced_parts,
)
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import aligned, plural

_RATES = {
    PRODUCTS: ("gemm_bf16", "gemm_fp8", "gemm_fp8_rowwise"),
    ATTENTION: ("attention",),
    POINTWISE: ("memory_efficiency",),
    COMMUNICATION: ("link_efficiency", "network_efficiency"),
}
"""Constants that the time of a part is inversely proportional to."""
_ROUNDS = 20
_MOST = 3.0
"""Factor by which a part's time changes a constant at most: a part depends on others, too, as a
loss does on memory.
"""
_CLOSE = 0.002
"""Relative error of the fitted plan's step at which the fit ends."""


@dataclass(frozen=True)
class Measured:
    """What a run recorded."""

    folder: Path
    world: int
    device: str
    """Its name in torch."""
    records: int
    tokens_per_second: float
    """Per GPU, the median; so is `step_s`."""
    step_s: float
    peak_gib: float
    parts: dict[str, float] | None
    """Seconds of a step by part; None without a profile."""
    trace: Path | None


def read_run(folder: Path) -> Measured:
    """The last start of the run in a dump folder.

    Raises:
        UserError: it holds no run, or too few steps.
    """
    try:
        start = json.loads((folder / "run.json").read_text())["starts"][-1]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if "tokens_per_second" in record]
        world = int(start["ranks"])
        devices = list(start["devices"])
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
    trace = _trace(folder)
    return Measured(
        folder,
        world,
        devices[0],
        len(steady),
        statistics.median(record["tokens_per_second"] for record in steady),
        statistics.median(record["step_time_s"] for record in steady),
        max(record["memory_gib"] for record in records),
        traced_parts(trace) if trace else None,
        trace,
    )


def _trace(folder: Path) -> Path | None:
    """The last trace of the first rank; None if the run wasn't profiled."""
    traces = load_config([_config(folder)]).config.profiling.save_traces_folder
    found = (folder / traces).glob("step_*/rank0_trace.json")
    return max(found, key=lambda path: int(path.parent.name.removeprefix("step_")), default=None)


def _config(folder: Path) -> str:
    if not (folder / "config.toml").is_file():
        raise UserError(f"--from-run: no {folder / 'config.toml'}; name a job.dump_folder")
    return f"--job.config_file={folder / 'config.toml'}"


def hardware_of(run: Measured) -> Hardware:
    """The built-in hardware whose device the run reports.

    Raises:
        ConfigError: there is none.
    """
    known = load_hardware()
    for hardware in known.values():
        if run.device in hardware.device_names:
            return hardware
    raise ConfigError(
        [
            f"--hardware: the run's device, {run.device}, is in no table; name the "
            f"nearest of {', '.join(known)}, or a "
            "file (--calibrate FILE writes one)"
        ]
    )


def plan_run(run: Measured, flags: list[str], hardware: Hardware, *, tracing: bool) -> Plan:
    """The plan of what the run did.

    Args:
        flags: override the run's configuration.
    """
    return make_plan([_config(run.folder), *flags], run.world, hardware, tracing=tracing)[0]


# ---- comparison


def compared(run: Measured, plan: Plan) -> dict[str, tuple[float, float]]:
    """Measured and planned figures."""
    figures = {
        "tokens/s per GPU": (run.tokens_per_second, plan.tokens_per_second),
        "step, s": (run.step_s, plan.time.seconds),
        "peak, GiB": (run.peak_gib, plan.peak_gib),
    }
    if run.parts:
        planned = planned_parts(plan.time.parts)
        figures |= {f"{part}, s": (seconds, planned[part]) for part, seconds in run.parts.items()}
    return figures


def comparison_text(run: Measured, plan: Plan) -> str:
    """A run beside its plan, for a terminal."""
    rows = [["", "measured", "planned", "difference"]]
    for name, (measured, planned) in compared(run, plan).items():
        digits = ",.0f" if max(measured, planned) >= 1000 else ".3g"
        difference = f"{planned / measured - 1:+.1%}" if measured else "-"
        rows.append([name, f"{measured:{digits}}", f"{planned:{digits}}", difference])
    notes = [
        f"Parts from {run.trace}"
        if run.trace
        else "No profile: set profiling.enable_profiling to compare parts"
    ]
    if run.device == "cpu":
        notes.append(
            "On a CPU the memory measured is that of the whole process, and the plan's "
            "that of tensors"
        )
    head = f"{run.folder}: median of {plural(run.records, 'record')} on {run.world} x {run.device}"
    return "\n".join([head, aligned(rows), *notes])


def comparison_data(run: Measured, plan: Plan) -> dict[str, Any]:
    """A run beside its plan, for JSON."""
    figures = {
        name: {"measured": measured, "planned": planned}
        for name, (measured, planned) in compared(run, plan).items()
    }
    return {
        "folder": str(run.folder),
        "records": run.records,
        "device": run.device,
        "figures": figures,
    }


# ---- fit


def fit(run: Measured, plan: Plan) -> Hardware:
    """The plan's hardware with constants that make the plan's step as long as the run's.

    With a profile, each part's rate is fitted to its time. What then remains, or without a profile
    all of it, is divided equally: all rates of compute and memory, and the host's work, are scaled
    alike, since one figure can't tell them apart.
    """
    hardware = plan.hardware
    base = plan.hardware
    for _ in range(_ROUNDS if run.parts else 0):
        planned = planned_parts(predict(plan.workload, plan.spec, hardware).time.parts)
        for part, names in _RATES.items():
            if (measured := (run.parts or {})[part]) > 0 and planned[part] > 0:
                ratio = planned[part] / measured
                if part == POINTWISE and not plan.workload.compiled:
                    hardware = _scaled(hardware, base, ("eager",), 1 / ratio)
                else:
                    hardware = _scaled(hardware, base, names, ratio)
    every = [name for part, names in _RATES.items() if part != COMMUNICATION for name in names]
    for _ in range(_ROUNDS):
        ratio = predict(plan.workload, plan.spec, hardware).time.seconds / run.step_s
        if abs(ratio - 1) < _CLOSE:
            break
        hardware = _scaled(hardware, hardware, every, ratio)
        hardware = _scaled(hardware, hardware, ("step_overhead",), 1 / ratio)
    return hardware


def _scaled(hardware: Hardware, base: Hardware, names: Iterable[str], factor: float) -> Hardware:
    """Scale constants, staying within a factor of `_MOST` of those of `base`."""
    scaled = {}
    for name in names:
        own = getattr(base, name)
        scaled[name] = min(own * _MOST, max(own / _MOST, getattr(hardware, name) * factor))
    return hardware.model_copy(update=scaled)


def fitted_file(run: Measured, plan: Plan) -> str:
    """The text of a hardware file whose constants are fitted to the run."""
    fitted = fit(run, plan)
    source = (
        f"{run.folder}, {run.world} x {run.device}, {plan.config.model.name} "
        f"{plan.config.model.flavor}"
    )
    return to_table(
        "fitted", fitted, plan.hardware, f"fitted to {source}; the rest as {plan.hardware.name}"
    )
