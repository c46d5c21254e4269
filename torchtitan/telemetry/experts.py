"""Metrics of a mixture's experts: how evenly they are loaded, and how many are dead."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

DEAD_AFTER = 100
"""An expert is dead if it got no row while an equal share of them would have been at least this
many. By then chance doesn't explain it, whatever the batch size and `metrics.log_freq`.
"""
OVERLOAD = 3.0
"""Too high a load, relative to the mean of the layer: the rank does the work of three."""
OVERLOAD_STEPS = 100
"""Number of steps to wait: uneven loads are usual at the start of training, and pass."""
_NAMED = 8


class ExpertLoads(NamedTuple):
    """The rows of each expert over some steps."""

    rows: dict[int, list[int]]
    """Layer to the rows of its experts."""
    loss: float
    """Auxiliary losses of the last step with their coefficients, summed over the layers."""

    def summary(self) -> dict[str, Any]:
        """Entries of a record about all experts together."""
        peaks = {layer: max(rows) * len(rows) / sum(rows) for layer, rows in self.rows.items()}
        worst = max(peaks, key=lambda layer: peaks[layer])
        return {
            "expert_load_max": peaks[worst],
            "expert_load_max_layer": worst,
            "expert_entropy": sum(map(_entropy, self.rows.values())) / len(self.rows),
            "auxiliary_loss": self.loss,
        }


def read_loads(table: Tensor) -> ExpertLoads | None:
    """The loads in a table on the host; None if no token was routed.

    Args:
        table: `[layers, experts + 1]`; the last column holds auxiliary losses. A layer without
            experts has no rows.
    """
    rows = {
        layer: list(map(int, loads))
        for layer, (*loads, _) in enumerate(table.tolist())
        if any(loads)
    }
    return ExpertLoads(rows, table[:, -1].sum().item()) if rows else None


def _entropy(rows: Sequence[int]) -> float:
    """Entropy of the distribution of rows over experts, relative to the uniform one."""
    if len(rows) == 1:
        return 1.0
    shares = [n / sum(rows) for n in rows if n]
    return -sum(p * math.log(p) for p in shares) / math.log(len(rows))


class DeadExperts:
    """Names experts that no token is sent to."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, int], float] = {}
        """(layer, expert) to the mean load of its layer since it last got a row."""
        self._named: set[tuple[int, int]] = set()

    def observe(self, loads: ExpertLoads) -> tuple[int, str | None]:
        """The number of dead experts after these loads, and a warning if some are new."""
        for layer, rows in loads.rows.items():
            for expert, n in enumerate(rows):
                idle = self._idle.get((layer, expert), 0.0) + sum(rows) / len(rows)
                self._idle[layer, expert] = 0.0 if n else idle
        dead = {key for key, idle in self._idle.items() if idle >= DEAD_AFTER}
        new = sorted(dead - self._named)
        self._named = dead
        if not new:
            return len(dead), None
        names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in new[:_NAMED])
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        return len(dead), (
            f"dead experts, to which no token is sent: {names}{more}. Raise moe.balance_bias_rate "
            "or moe.global_balance_loss, or lower optimizer.lr"
        )


class Overload:
    """Warns once of a load that stays uneven."""

    def __init__(self) -> None:
        self._steps = 0
        """Number of steps since the last record without an overloaded expert."""
        self._warned = False

    def observe(self, loads: ExpertLoads, steps: int) -> str | None:
        """A warning after the loads of some steps, if one is due."""
        load = loads.summary()
        self._steps = self._steps + steps if load["expert_load_max"] > OVERLOAD else 0
        if self._steps < OVERLOAD_STEPS or self._warned:
            return None
        self._warned = True
        return (
            f"an expert of layer {load['expert_load_max_layer']} gets "
            f"{load['expert_load_max']:.1f} times the mean load, and for {self._steps:,} steps one "
            f"has had more than {OVERLOAD:g} times. Raise moe.global_balance_loss or "
            "moe.balance_bias_rate, or lower optimizer.lr"
        )
