"""Hardware that no table has: a file fitted to a run on it, or this machine's CPU, measured."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.tools.planner.hardware import Hardware, load_hardware, to_table
from torchtitan.tools.planner.planner import make_plan
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import aligned, plural

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
    device: str
    """Its name in torch."""
    records: int
    tokens_per_second: float
    """Median per GPU."""
    step_s: float
    """Median."""
    peak_gib: float


def read_run(folder: Path) -> Measured:
    """The last start of the run in a dump folder.

    Raises:
        UserError: it holds no run, or too few steps.
    """
    try:
        start = json.loads((folder / "run.json").read_bytes())["starts"][-1]
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
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
    return Measured(
        folder,
        world,
        devices[0],
        len(steady),
        tokens_per_second=statistics.median(record["tokens_per_second"] for record in steady),
        step_s=statistics.median(record["step_time_s"] for record in steady),
        peak_gib=max(record["memory_gib"] for record in records),
    )


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
            f"--hardware: the run's device, {run.device}, is in no table; name the nearest of "
            f"{', '.join(known)}, or a TOML file"
        ]
    )


def plan_run(run: Measured, flags: list[str], hardware: Hardware) -> Plan:
    """The plan of what the run did.

    Args:
        flags: override the run's configuration.
    """
    return make_plan([_config(run.folder), *flags], run.world, hardware)[0]


# ---- comparison


def compared(run: Measured, plan: Plan) -> dict[str, tuple[float, float]]:
    """Measured and planned figures."""
    return {
        "tokens/s per GPU": (run.tokens_per_second, plan.tokens_per_second),
        "step, s": (run.step_s, plan.time.seconds),
        "peak, GiB": (run.peak_gib, plan.peak_gib),
    }


def comparison_text(run: Measured, plan: Plan) -> str:
    """A run beside its plan, for a terminal."""
    rows = [["", "measured", "planned", "difference"]]
    for name, (measured, planned) in compared(run, plan).items():
        digits = ",.0f" if max(measured, planned) >= 1000 else ".3g"
        difference = f"{planned / measured - 1:+.1%}" if measured else "-"
        rows.append([name, f"{measured:{digits}}", f"{planned:{digits}}", difference])
    head = f"{run.folder}: median of {plural(run.records, 'record')} on {run.world} x {run.device}"
    notes = []
    if run.device == "cpu":
        notes.append("The memory measured on a CPU is that of the process; the plan's, of tensors")
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
    """The plan's hardware with rates that make the plan's step as long as the run's.

    All rates and the host's work are scaled alike, since one figure can't tell them apart.
    """
    hardware = plan.hardware
    for _ in range(_ROUNDS):
        ratio = predict(plan.workload, plan.spec, hardware).time.seconds / run.step_s
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


def fitted_file(run: Measured, plan: Plan) -> str:
    """The text of a hardware file whose constants are fitted to the run."""
    fitted = fit(run, plan)
    source = f"{run.folder}, {run.world} x {run.device}, {plan.config.model.label}"
    return to_table(
        "fitted", fitted, plan.hardware, f"fitted to {source}; the rest as {plan.hardware.name}"
    )


# ---- this machine's CPU

_SECONDS = 1.0
"""Duration of each measurement, after a first call."""


def describe_cpu() -> str:
    """The text of a hardware file for one rank on this machine's CPU, measured within seconds."""
    import psutil
    import torch
    import torch.nn.functional as F

    def square(dtype: torch.dtype) -> float:
        """FLOP/s of a square matrix product."""
        size = 1024
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        return 2 * size**3 / _fastest(lambda: a @ b)

    bf16, fp32 = square(torch.bfloat16), square(torch.float32)
    q = torch.randn(1, 16, 512, 64)
    visible = 2 * 512**2 * 16 * 64  # FLOPs of the unmasked half
    attention = visible / _fastest(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    source = torch.empty(2**27, dtype=torch.uint8)
    target = torch.empty_like(source)
    moved = 2 * len(source) / _fastest(lambda: target.copy_(source))
    return f"""# This machine's CPU, measured.
[this-machine]
description = "CPU, measured"
device = "cpu"
memory_gib = {psutil.virtual_memory().total / 2**30:.1f}
bf16 = {bf16:.4g}
fp8 = 0
fp32 = {fp32:.4g}
gemm_bf16 = 1.0  # included in the rates above, as are small products
gemm_fp8 = 1.0
gemm_ramp = 0.0
gemm_depth = 0.0
attention = {attention / fp32:.3f}  # forward
memory_bandwidth = {moved:.4g}
memory_efficiency = 1.0
gpus_per_node = 1
reserve_gib = 1.0  # an estimate
eager = 1.5  # an estimate
"""


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of one call, in the fastest round, since other processes may use the machine."""
    work()
    best = float("inf")
    until = time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        begin = time.perf_counter()
        for _ in range(4):
            work()
        best = min(best, (time.perf_counter() - begin) / 4)
    return best
