"""The hardware of this machine."""

import subprocess
import tempfile
from pathlib import Path

from torchtitan.tools.planner.hardware import Hardware, find_hardware, load_hardware

CPU = "cpu"


def local_gpus() -> tuple[str | None, int]:
    """The hardware that this machine's GPUs are known as, if they are, and their number."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(
            query,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        return None, 0
    names = [name.strip() for name in names if name.strip()]
    known = (
        hardware.name
        for hardware in load_hardware().values()
        if names and names[0] in hardware.device_names
    )
    return next(known, None), len(names)


def measure_cpu() -> tuple[Hardware, str]:
    """This machine's CPU, measured within seconds, and the file that describes it."""
    from torchtitan.tools.planner.calibrate import describe_cpu  # imports torch

    text = describe_cpu()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "hardware.toml")
        file.write_text(text)
        return find_hardware(str(file)), text


def devices_per_host(hardware: Hardware) -> int:
    """Devices that a launcher starts ranks on."""
    return hardware.gpus_per_host or hardware.gpus_per_node
