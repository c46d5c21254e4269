"""The plan that the launcher gives to a run, for the run to compare itself with."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.config.sections.schema import Config
from torchtitan.telemetry.planned import Planned
from torchtitan.tools.planner.corrections import correction, hardware_called
from torchtitan.tools.planner.cpu import CPU
from torchtitan.tools.planner.hardware import Hardware, hardware_with
from torchtitan.train.preflight import Setup

if TYPE_CHECKING:
    from torchtitan.tools.planner.predict import Plan

_GPUS = Path("/proc/driver/nvidia/gpus")
"""Asking nvidia-smi takes a second."""


def planned(plan: "Plan") -> Planned:
    """The figures of a plan that a run can compare itself with."""
    from torchtitan.tools.planner.saves import saves_of

    hardware = plan.hardware
    on_cpu = hardware.device == CPU
    checkpoint = plan.config.checkpoint
    waits = checkpoint.enable and checkpoint.async_mode != "disabled" and not on_cpu
    first = plan.memory[0]  # rank 0's, as a run measures
    return Planned(
        hardware=hardware.name,
        devices=(CPU,) if on_cpu else hardware.device_names,
        step_s=plan.time.seconds,
        band=plan.speed_band,
        peak_gib=None if on_cpu else first.reserved / 2**30,
        memory_band=plan.memory_band,
        save_s=saves_of(plan, float("inf")).blocked if waits else None,
        time_s=dict(plan.time.parts),
        memory_gib={part: size / 2**30 for part, size in first.parts.items()},
    )


def plan_of_run(config: Config, setup: Setup, world: int) -> Planned | None:
    """The plan of a run on this machine's devices.

    None if they are not in the planner's table, on a CPU that no run has corrected, and for rows
    whose length changes.
    """
    with suppress(Exception):  # nothing that a plan can't do may stop a run
        if (hardware := hardware_here()) is not None:
            # 50 ms, only where they are of use
            from torchtitan.tools.planner.planner import plan_of_stages

            plan = plan_of_stages(config, setup, hardware)
            return None if plan.stages else planned(plan)
    return None


def hardware_here() -> Hardware | None:
    """This machine's GPUs, or its CPU if a run has corrected it."""
    model = None if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else _gpu_model()
    if model is None:
        return correction(CPU)
    hardware = hardware_with(model)
    return None if hardware is None else hardware_called(hardware.name)


def _gpu_model() -> str | None:
    """The name of this machine's first NVIDIA GPU, as its driver tells; None without one."""
    for information in sorted(_GPUS.glob("*/information")):
        for line in information.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    return None
