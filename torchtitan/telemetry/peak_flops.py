"""Peak rates of accelerators, from `hardware.toml`, which the planner reads in full."""

from pathlib import Path

import tomli

FILE = Path(__file__).with_name("hardware.toml")


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device for compute in `dtype`; None, never a guess, if it isn't known.

    Args:
        device_name: as torch reports it, for example `NVIDIA H100 80GB HBM3`.
    """
    if dtype != "bfloat16":
        return None
    tables = tomli.loads(FILE.read_text(encoding="utf-8"))
    matches = [name for name in tables["peak_bf16"] if name in device_name]
    if not matches:
        return None
    peak = tables["peak_bf16"][max(matches, key=len)]
    return tables[peak]["bf16"] if isinstance(peak, str) else peak
