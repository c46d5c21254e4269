"""Measure this machine's rates for a hardware file.

One device's matrix products by type, causal attention, and memory bandwidth are measured, at the sizes of a training
step. Rates between devices come from the data sheet of a known device, and are otherwise guessed and marked as such.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from torchtitan.plan.hardware import load_hardware

_SECONDS = 1.0
"""Duration of each measurement, after a first call."""
_LINK_GUESS = 4
"""Memory bandwidth over that of a link or a network port, where neither is known: a guess."""
_CPU = ("reserve_gib = 1.0  # a guess", "eager = 1.5  # a guess")
"""Constants of a CPU that differ from the shared ones."""


def calibrate() -> str:
    """The text of a hardware file for this machine."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else "CPU"
    known = next((hw for hw in load_hardware().values() if name in hw.device_names), None)
    size = 8192 if cuda else 1024
    bf16, fp32 = (_matmul(size, device, dtype) for dtype in (torch.bfloat16, torch.float32))
    fp8 = _matmul_fp8(size, device) if cuda and torch.cuda.get_device_capability() >= (8, 9) else 0.0
    dtype = torch.bfloat16 if cuda else torch.float32  # what training would use
    attention = _attention(8192 if cuda else 512, device, dtype)
    memory = _copy(2**30 if cuda else 2**27, device)
    peaks = (
        {"bf16": known.bf16, "fp8": known.fp8, "fp32": known.fp32}
        if known
        else {"bf16": bf16, "fp8": fp8, "fp32": fp32}
    )
    base = peaks["bf16"] if cuda else peaks["fp32"]
    lines = [
        "# Measured by torchtitan plan --calibrate.",
        "[this-machine]",
        f'description = "{name}, measured"',
        f'device = "{device.type}"',
        f"memory_gib = {_memory_gib(cuda):.1f}",
        *(f"{key} = {value:.4g}  # {'data sheet' if known else 'measured'}" for key, value in peaks.items()),
        f"gemm_bf16 = {bf16 / peaks['bf16']:.3f}  # measured",
        f"gemm_fp8 = {fp8 / peaks['fp8'] if fp8 and peaks['fp8'] else 1.0:.3f}  # measured where the device has Float8",
        f"attention = {attention / base:.3f}  # measured, forward",
        f"memory_bandwidth = {known.memory_bandwidth if known else memory:.4g}",
        f"memory_efficiency = {memory / known.memory_bandwidth if known else 1.0:.3f}  # measured",
    ]
    if known:
        lines += [
            f"link = {known.link:.4g}",
            f"network = {known.network:.4g}",
            f"gpus_per_node = {known.gpus_per_node}",
        ]
    else:
        ranks = max(1, torch.cuda.device_count())
        lines += [
            f"link = {memory / _LINK_GUESS:.4g}  # a guess",
            f"network = {memory / _LINK_GUESS:.4g}  # a guess",
            f"gpus_per_node = {ranks}",
        ]
    return "\n".join([*lines, *(() if cuda else _CPU), ""])


def _memory_gib(cuda: bool) -> float:
    if cuda:
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    import psutil

    return psutil.virtual_memory().total / 2**30


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, in the fastest of several rounds, since other processes may use the machine."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        begin = time.perf_counter()
        for _ in range(4):
            work()
        wait()
        best = min(best, (time.perf_counter() - begin) / 4)
    return best


def _matmul(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _matmul_fp8(size: int, device: torch.device) -> float:
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled = torch._scaled_mm
    return 2 * size**3 / _seconds(lambda: scaled(a, a.t(), one, one, out_dtype=torch.bfloat16), device)


def _attention(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention's forward; only the unmasked half counts."""
    q = torch.randn(1, 16, size, 64 if device.type == "cpu" else 128, device=device).to(dtype)
    flops = 2 * size**2 * q.shape[1] * q.shape[3]
    return flops / _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), device)


def _copy(size: int, device: torch.device) -> float:
    """Bytes/s that a copy reads and writes in total."""
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / _seconds(lambda: b.copy_(a), device)
