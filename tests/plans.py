"""What the planner's tests share."""

from torchtitan.config import load_config
from torchtitan.models import get_spec
from torchtitan.tools.planner.hardware import Hardware, find_hardware
from torchtitan.tools.planner.predict import derived_workload
from torchtitan.tools.planner.workload import Workload

CPU_HARDWARE = """
[cpu]
description = "a CPU"
device = "cpu"
measured = true
memory_gib = 16
bf16 = 3e10
fp8 = 0
fp32 = 3e10
memory_bandwidth = 6e9
gpus_per_node = 1
gemm_bf16 = 1.0
gemm_ramp = 0.0
gemm_start = 0.0
attention = 0.5
reserve_gib = 1.0
"""

SPEC = get_spec("llama3")
H100 = find_hardware("h100-sxm")
TINY = [
    f"--model.overrides.{key}={value}"
    for key, value in {
        "dim": 64,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 4,
        "ffn_dim": 96,
    }.items()
]
NONE = "--activation_checkpoint.mode=none"
FULL = "--activation_checkpoint.mode=full"
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
ONE_ROW = ["--training.seq_len=8192", "--training.local_batch_size=1"]


def workload(*argv: str, world: int = 1) -> Workload:
    return derived_workload(load_config(list(argv)).config, SPEC, world)


def product_seconds(
    hw: Hardware, sizes: list[tuple[float, float, float]], rate: float, *, ramp: float = 1.0
) -> float:
    """The three products of linear layers of `sizes` (rows, inputs, outputs), by the formula of
    docs/internals/plan.md.

    Args:
        rate: FLOP/s.
        ramp: share of the ramp that each product has.
    """
    seconds = 0.0
    for m, k, n in sizes:
        for rows, columns, inner in (m, n, k), (m, k, n), (k, n, m):
            idle = hw.gemm_ramp * ramp * min(inner, hw.gemm_split)
            seconds += 2 * (rows * columns * inner + idle) / rate
            seconds += hw.gemm_start * (ramp + rows * columns / hw.gemm_ramp)
    return seconds
