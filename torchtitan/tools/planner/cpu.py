"""This machine's CPU, measured."""

import sys
import tempfile
from pathlib import Path

from torchtitan.tools.planner.hardware import Hardware, find_hardware

CPU = "cpu"
"""The name of this machine's CPU among hardware."""
_SECONDS = 1.0
"""Duration of each measurement."""


def find_or_measure(name: str) -> tuple[Hardware, str | None]:
    """The hardware for a plan: from the built-in table, a TOML file, or `cpu`: this machine's, with
    the text of its hardware file.

    Raises:
        ConfigError: there is none.
    """
    if name != CPU:
        return find_hardware(name), None
    print("Measuring this machine's CPU, for a few seconds ...", file=sys.stderr)
    text = describe_cpu()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "hardware.toml")
        file.write_text(text)
        return find_hardware(str(file)), text


def describe_cpu() -> str:
    """The text of a hardware file for one rank on this machine's CPU, measured within seconds."""
    import psutil
    import torch
    import torch.nn.functional as F

    from torchtitan.utils.device import cpu_product_rate, fastest

    bf16, fp32 = (cpu_product_rate(dtype, 1024, _SECONDS) for dtype in ("bfloat16", "float32"))
    q = torch.randn(1, 16, 512, 64)
    causal_flops = 2 * 512**2 * 16 * 64  # FLOPs of the unmasked half
    attention = causal_flops / fastest(
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), _SECONDS
    )
    source = torch.empty(2**27, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_rate = 2 * len(source) / fastest(lambda: target.copy_(source), _SECONDS)
    return f"""# This machine's CPU, measured.
[this-machine]
description = "CPU, measured"
device = "cpu"
measured = true
memory_gib = {psutil.virtual_memory().total / 2**30:.1f}
bf16 = {bf16:.4g}
fp8 = 0
fp32 = {fp32:.4g}
gemm_bf16 = 1.0  # included in the rates above, as are small products
gemm_fp8 = 1.0
gemm_ramp = 0.0
gemm_start = 0.0
attention = {attention / fp32:.3f}  # forward
memory_bandwidth = {copy_rate:.4g}
memory_efficiency = 1.0
gpus_per_node = 1
reserve_gib = 1.0  # an estimate
eager = 1.5  # an estimate
"""
