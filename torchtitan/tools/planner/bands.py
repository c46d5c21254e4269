"""How far off a plan may be: relative errors within which 90 % of published measurements are, by
what a run uses.

Each feature adds to the variance of the error's logarithm. The deviations were fitted to the
measurements that no constant was fitted to
(`python benchmarks/published/plan_accuracy.py --fit`), and are checked there by leaving rows out.
"""

import math

from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.workload import Workload

SPEED_DEVIATIONS = {
    "every run": 0.040,
    "scaled hardware": 0.095,
    "tp": 0.002,
    "cp": 0.093,
    "pp": 0.077,
    "8 bits": 0.073,
    "experts": 0.391,
}
"""Relative standard deviation of throughput that a feature adds."""
WIDTH = 1.76
"""Deviations of a band on either side."""
MEMORY_BAND = 0.05
MEMORY_BAND_PIPELINE = 0.12
"""Relative error of the peak memory, without and with a pipeline."""
MEMORY_BAND_COMPILED_LOSS = 0.11
"""Relative deviation that a compiled loss adds, of the same width. An estimate: no published figure
has one, and its bytes per logit are known from what inductor generates for the CPU alone.
"""


def features(w: Workload, hw: Hardware) -> list[str]:
    """What of `SPEED_DEVIATIONS` applies to a workload."""
    used = {
        "every run": True,
        "scaled hardware": not hw.fitted,
        "tp": w.tp > 1,
        "cp": w.cp > 1,
        "pp": w.pp > 1,
        "8 bits": w.float8 or w.mx,
        "experts": w.experts > 0,
    }
    return [name for name, applies in used.items() if applies]


def speed_band(w: Workload, hw: Hardware) -> float:
    """Relative error of throughput within which 90 % of such plans are."""
    return WIDTH * math.hypot(*(SPEED_DEVIATIONS[name] for name in features(w, hw)))


def memory_band(w: Workload) -> float:
    """Relative error of the peak memory within which 90 % of such plans are."""
    band = MEMORY_BAND_PIPELINE if w.pp > 1 else MEMORY_BAND
    return math.hypot(band, MEMORY_BAND_COMPILED_LOSS) if w.loss_compiled else band
