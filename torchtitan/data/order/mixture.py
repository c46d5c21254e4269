"""Which source each row of each step comes from: a function of (seed, weights, step, row) alone.

At every step, each source has had its share of the rows since its weights last changed, to within
one row. That is the chairman assignment problem (Tijdeman, "The chairman assignment problem",
1980): the k-th row of a source may come once its share exceeds k - 1, and must have come when its
share reaches k. Giving each place to the source whose row is due first always succeeds (Steiner and
Yeomans, "Level schedules for mixed-model, just-in-time processes", 1993).
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.order.shuffle import mixed
from torchtitan.data.positions import SharesState

Slots = NDArray[np.int64]
"""Rows of a step, by their index in it, ascending."""


@dataclass
class Shares:
    """Divides rows among sources by weight, exactly: counts and weights are integers."""

    weights: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    """Divided since the weights last changed."""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows of each source since then."""
    _aimed: Mapping[str, Fraction] = field(default_factory=dict)

    def aim(self, weights: Mapping[str, Fraction]) -> None:
        """Divide by `weights` from now on."""
        if weights == self._aimed:
            return
        self._aimed = weights
        whole = _whole(weights)
        if whole != self.weights:
            self.weights = whole
            self.rows = 0
            self.counts = dict.fromkeys(whole, 0)

    def take(self, rows: int) -> dict[str, int]:
        """The next `rows` rows: how many of each source."""
        self.rows += rows
        total = sum(self.weights.values())
        now = {
            name: max(self.counts[name], weight * self.rows // total)
            for name, weight in self.weights.items()
        }
        due = [
            name for name, weight in self.weights.items() if now[name] * total < weight * self.rows
        ]
        due.sort(key=lambda name: Fraction(now[name] + 1, self.weights[name]))
        for name in due[: self.rows - sum(now.values())]:
            now[name] += 1
        taken = {name: now[name] - self.counts[name] for name in now}
        self.counts = now
        return taken

    def position(self) -> SharesState:
        return SharesState(
            weights=self.weights,
            rows=self.rows,
            counts=self.counts,
        )

    def seek(self, position: SharesState) -> None:
        self._aimed = {}
        self.weights = position.weights
        self.rows = position.rows
        self.counts = position.counts


def _whole(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Integers in the ratio of `weights`, without sources of weight zero."""
    used = {name: weight for name, weight in weights.items() if weight > 0}
    unit = Fraction(1)
    if used:
        unit = Fraction(
            np.gcd.reduce([w.numerator for w in used.values()], dtype=object)
        ) / Fraction(np.lcm.reduce([w.denominator for w in used.values()], dtype=object))
    return {name: int(weight / unit) for name, weight in used.items()}


def divide(
    shares: Shares,
    weights: Mapping[str, Fraction],
    rows: int,
    left: Mapping[str, int],
) -> dict[str, int]:
    """How many of the next `rows` rows come from each source.

    Args:
        weights: of all sources, at this step.
        left: rows that a source still has, for those that end. From the step in which one ends, the
        others share its
            weight.

    Returns:
        Fewer than `rows` in total if all sources end.
    """
    left = dict(left)
    taken = dict.fromkeys(weights, 0)
    while rows:
        shares.aim({name: weight for name, weight in weights.items() if left.get(name, 1) > 0})
        if not shares.weights:
            break
        before = shares.position()
        part = shares.take(rows)
        if ending := {
            name: left[name] for name, count in part.items() if name in left and count > left[name]
        }:
            shares.seek(before)
            part = ending  # their last rows
        for name, count in part.items():
            taken[name] += count
            rows -= count
            if name in left:
                left[name] -= count
    return taken


def place(counts: Mapping[str, int], seed: int, step: int) -> dict[str, Slots]:
    """The rows of a step that come from each source, scattered over the batch so that all ranks get
    some of each.
    """
    total = sum(counts.values())
    used = [name for name, count in counts.items() if count]
    if len(used) == 1:
        return {used[0]: np.arange(total)}
    order = np.argsort(mixed(np.arange(total), seed, step), kind="stable")
    cuts = np.cumsum(list(counts.values()))[:-1]
    return {name: np.sort(part) for name, part in zip(counts, np.split(order, cuts), strict=True)}


class Phase(NamedTuple):
    """Steps between two changes of the configuration."""

    first: int
    """Counted from 0."""
    rows: int
    """Of each step, over all ranks."""
    weights: Mapping[str, Fraction]


def _with_ends(phases: Sequence[Phase]) -> Iterator[tuple[Phase, int]]:
    """Each phase, and the step after it."""
    return zip(phases, [*(phase.first for phase in phases[1:]), sys.maxsize], strict=True)


def run_dry(phases: Sequence[Phase], left: Mapping[str, int], steps: range) -> dict[str, int]:
    """In which of `steps` each source that ends gives its last row, to within a row; both counted
    from 0.

    Args:
        left: rows that a source still has before the first of `steps`, for those that end.
    """
    rest = {name: Fraction(rows) for name, rows in left.items()}
    ended: dict[str, int] = {}
    now = Fraction(steps.start)
    for phase, after in _with_ends(phases):
        end = min(after, steps.stop)
        while now < end:
            weights = {
                name: weight
                for name, weight in phase.weights.items()
                if weight > 0 and name not in ended
            }
            if not weights:
                return ended
            per_step = {
                name: phase.rows * weight / sum(weights.values())
                for name, weight in weights.items()
            }
            until = {
                name: now + rest[name] / rate for name, rate in per_step.items() if name in rest
            }
            change = min([Fraction(end), *until.values()])
            for name in until:
                rest[name] -= (change - now) * per_step[name]
            now = change
            ended |= {
                name: max(math.ceil(now) - 1, steps.start) for name in until if until[name] == now
            }
    return ended


def whole_steps(phases: Sequence[Phase], rows: int, first: int) -> int:
    """How many steps, from `first` on, `rows` rows are enough for."""
    step = first
    for phase, after in _with_ends(phases):
        if step < after:
            steps = min(rows // phase.rows, after - step)
            step = step + steps
            rows = rows - steps * phase.rows
            if step < after:
                break
    return step - first
