"""Clock, power and temperature of a GPU while it computes, as nvidia-smi reports them."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from tempfile import TemporaryFile

LOAD = (
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",  # a driver from 535 on
)
"""Fields that change while a GPU computes, and their limits: MHz, W, degrees Celsius, and why the
clock is below its maximum.
"""
_REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake of the host",
}
"""Bits of `clocks_event_reasons.active` (nvml.h) that mean a slower GPU. The others are idling and
settings of the clock.
"""


def device_uuid() -> str:
    """nvidia-smi's UUID of this rank's GPU; empty on the CPU, and if torch has none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return f"GPU-{str(uuid).removeprefix('GPU-')}" if uuid else ""


@contextmanager
def watch(gpu: str = "", every_ms: int = 500) -> Iterator[list[dict[str, str]]]:
    """Ask for `LOAD` again and again while the body runs. The list has the rows after it, none
    where nvidia-smi doesn't work.

    Args:
        gpu: index or UUID of a GPU; all by default.
    """
    from torchtitan.utils.accelerators import query_command, read_rows

    rows: list[dict[str, str]] = []
    command = [*query_command(LOAD, gpu), f"--loop-ms={every_ms}"]
    with TemporaryFile("w+") as out:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        except OSError:
            yield rows
            return
        try:
            yield rows
        finally:
            process.terminate()
            process.wait()
            out.seek(0)
            rows += read_rows(out.read(), LOAD)


def summary(rows: Sequence[Mapping[str, str]]) -> dict[str, object]:
    """Rows of `LOAD` in one: each number as its minimum, median and maximum, or alone where those
    are equal, and what slowed the clock in any row.
    """
    from torchtitan.utils.accelerators import number

    found: dict[str, object] = {"samples": len(rows)}
    for field in LOAD[:-1]:
        values = [value for row in rows if (value := number(row[field])) is not None]
        if values:
            low, high = min(values), max(values)
            found[field] = low if low == high else [low, median(values), high]
    bits = 0
    for row in rows:
        mask = row[LOAD[-1]]
        bits |= int(mask, 16) if mask.startswith("0x") else 0
    return found | {"slowed_by": [name for bit, name in _REASONS.items() if bits & bit]}
