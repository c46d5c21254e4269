"""Metrics of a mixture's experts: the balance of their loads, and the number of dead experts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

DEAD_AFTER = 100
"""An expert is dead if it got no row while its equal share of the rows would have been at least
this many. That is no coincidence, for any batch size and `metrics.log_freq`.
"""
OVERLOAD = 3.0
"""Smallest overload, relative to the layer's mean load: the rank does the work of three."""
OVERLOAD_STEPS = 100
"""Number of steps to wait, since loads are usually uneven at the start of training."""
_MAX_NAMES = 8


class ExpertLoads(NamedTuple):
    """The rows of each expert over some steps."""

    rows: dict[int, list[int]]
    """Numbers of rows of the experts, by layer."""
    loss: float
    """Auxiliary losses of the last step with their coefficients, summed over the layers."""

    def summary(self) -> dict[str, Any]:
        """Entries of a record about all experts together."""
        peaks = {layer: max(rows) * len(rows) / sum(rows) for layer, rows in self.rows.items()}
        worst = max(peaks, key=peaks.__getitem__)
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
    """Entropy of the distribution of rows over experts, relative to a uniform distribution."""
    if len(rows) == 1:
        return 1.0
    shares = [n / sum(rows) for n in rows if n]
    return -sum(p * math.log(p) for p in shares) / math.log(len(rows))


class DeadExperts:
    """Finds experts that no token is sent to."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, int], float] = {}
        """Mean load of the layer since the expert last got a row, by (layer, expert)."""
        self._dead: set[tuple[int, int]] = set()

    def observe(self, loads: ExpertLoads) -> tuple[int, str | None]:
        """The number of dead experts after these loads, and a warning about new ones."""
        for layer, rows in loads.rows.items():
            for expert, n in enumerate(rows):
                idle = self._idle.get((layer, expert), 0.0) + sum(rows) / len(rows)
                self._idle[layer, expert] = 0.0 if n else idle
        dead = {key for key, idle in self._idle.items() if idle >= DEAD_AFTER}
        new = sorted(dead - self._dead)
        self._dead = dead
        if not new:
            return len(dead), None
        names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in new[:_MAX_NAMES])
        more = f" and {len(new) - _MAX_NAMES} more" if len(new) > _MAX_NAMES else ""
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
