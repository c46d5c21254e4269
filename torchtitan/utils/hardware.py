"""Peak rates of known accelerators. Unknown hardware is None, never a guess."""

# Dense bf16 tensor-core peaks in FLOP/s, from the vendors' data sheets. The first name found in the device's wins.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
    ("MI250X", 191.5e12),  # one of its two dies, which is one device
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device for compute in `dtype`, or None where it isn't known."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS if name in device_name), None)
