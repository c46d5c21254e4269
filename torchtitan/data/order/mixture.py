"""Which source each row of each step comes from, and each epoch's shuffle: functions of the seed.

The source of a row is a function of (seed, weights, step, row) alone.

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

from torchtitan.data.read.positions import SharesState

_ROUNDS = 4
_GOLDEN = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1


@dataclass
class Shares:
    """Divides rows among sources by weight, exactly: counts and weights are integers."""

    weights: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    """Rows divided since the weights last changed."""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows of each source since then."""
    _aimed: Mapping[str, Fraction] | None = None
    """The fractions that `weights` were made of; None: unknown."""

    def aim(self, weights: Mapping[str, Fraction]) -> None:
        """Divide by `weights` from now on."""
        if weights == self._aimed:
            return
        self._aimed = weights
        whole = _integer_ratio(weights)
        if whole != self.weights:
            self.weights = whole
            self.rows = 0
            self.counts = dict.fromkeys(whole, 0)

    def take(self, rows: int) -> dict[str, int]:
        """How many of the next `rows` rows come from each source."""
        self.rows += rows
        total = sum(self.weights.values())
        now = {}
        due = []
        for name, weight in self.weights.items():
            now[name] = max(self.counts[name], weight * self.rows // total)
            if now[name] * total < weight * self.rows:
                due.append(name)
        due.sort(key=lambda name: Fraction(now[name] + 1, self.weights[name]))
        for name in due[: self.rows - sum(now.values())]:
            now[name] += 1
        taken = {name: now[name] - self.counts[name] for name in now}
        self.counts = now
        return taken

    def position(self) -> SharesState:
        return SharesState(weights=self.weights, rows=self.rows, counts=self.counts)

    def seek(self, position: SharesState) -> None:
        self._aimed = None
        self.weights = position.weights
        self.rows = position.rows
        self.counts = position.counts


def _integer_ratio(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Integers in the ratio of `weights`, without sources of weight zero."""
    used = {name: weight for name, weight in weights.items() if weight > 0}
    above = math.gcd(*(weight.numerator for weight in used.values()))
    below = math.lcm(*(weight.denominator for weight in used.values()))
    return {name: int(weight * below / above) for name, weight in used.items()}


def divide(
    shares: Shares, weights: Mapping[str, Fraction], rows: int, left: Mapping[str, int]
) -> dict[str, int]:
    """How many of the next `rows` rows come from each source.

    Args:
        weights: the weights of all sources at this step.
        left: remaining rows of the sources that end. From the step in which one ends, the others
            share its weight.

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
        counts = shares.take(rows)
        ending = {name for name, count in counts.items() if count > left.get(name, count)}
        if ending:
            shares.seek(before)
            counts = {name: left[name] for name in counts if name in ending}  # their last rows
        for name, count in counts.items():
            taken[name] += count
            rows -= count
            if name in left:
                left[name] -= count
    return taken


def scatter(counts: Mapping[str, int], seed: int, step: int) -> dict[str, NDArray[np.int64]]:
    """The places of each source's rows in a step, ascending; scattered over the batch, so that all
    ranks get some.
    """
    total = sum(counts.values())
    used = [name for name, count in counts.items() if count]
    if len(used) == 1:
        return {used[0]: np.arange(total)}
    order = np.argsort(hash_values(np.arange(total), seed, step), kind="stable")
    cuts = np.cumsum(list(counts.values()))[:-1]
    return {
        name: np.sort(indices) for name, indices in zip(counts, np.split(order, cuts), strict=True)
    }


class BatchPlan(NamedTuple):
    """The batch of the steps between two changes of the configuration."""

    first: int
    """The first step, counted from 0."""
    rows: int
    """Rows of each step, over all ranks."""
    weights: Mapping[str, Fraction]
    seq_len: int
    """Predicted tokens of a row."""
    local_batch_size: int
    """Rows that a rank computes at once; a step is filled up to a multiple of it."""

    @property
    def tokens(self) -> int:
        """Predicted tokens of each step."""
        return self.rows * self.seq_len


def _plans_with_ends(plans: Sequence[BatchPlan]) -> Iterator[tuple[BatchPlan, int]]:
    """Each plan, and the step after it."""
    return zip(plans, [*(plan.first for plan in plans[1:]), sys.maxsize], strict=True)


def exhaustion_steps(
    plans: Sequence[BatchPlan], left: Mapping[str, int], steps: range
) -> dict[str, int]:
    """The step in which each source gives its last row, to within a row, if it is one of `steps`.

    Args:
        left: remaining tokens, before the first of `steps`, of the sources that end.
    """
    remaining = {name: Fraction(tokens) for name, tokens in left.items()}
    ended: dict[str, int] = {}
    now = Fraction(steps.start)
    for plan, after in _plans_with_ends(plans):
        end = min(after, steps.stop)
        while now < end:
            weights = {
                name: weight
                for name, weight in plan.weights.items()
                if weight > 0 and name not in ended
            }
            if not weights:
                return ended
            per_step = {
                name: plan.tokens * weight / sum(weights.values())
                for name, weight in weights.items()
            }
            until = {
                name: now + remaining[name] / rate
                for name, rate in per_step.items()
                if name in remaining
            }
            change = min([Fraction(end), *until.values()])
            for name in until:
                remaining[name] -= (change - now) * per_step[name]
            now = change
            ended |= {
                name: max(math.ceil(now) - 1, steps.start) for name in until if until[name] == now
            }
    return ended


def whole_steps(plans: Sequence[BatchPlan], tokens: int, first: int) -> int:
    """How many steps, from `first` on, `tokens` tokens are enough for."""
    step = first
    for plan, after in _plans_with_ends(plans):
        if step < after:
            steps = min(tokens // plan.tokens, after - step)
            step += steps
            tokens -= steps * plan.tokens
            if step < after:
                break
    return step - first


def _mix(x: int, key: int) -> int:
    """splitmix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators",
    2014).
    """
    x = (x + key) * _GOLDEN & _64_BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _64_BITS
    return x ^ (x >> 31)


def hash_values(values: NDArray[np.int64], *keys: int) -> NDArray[np.uint64]:
    """A hash of each of `values`, which depends on `keys`."""
    key = 0
    for value in keys:
        key = _mix(value & _64_BITS, key)
    x = (values.astype(np.uint64) + np.uint64(key)) * np.uint64(_GOLDEN)  # as _mix, modulo 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """The item at position `index` of an epoch over `size` items: a bijection of `[0, size)`.

    A shuffle without a table: a balanced Feistel network over the smallest even number of bits that
    holds `size`, applied again while the result lies outside (cycle walking; Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002).
    """
    if size <= 1:
        return 0
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    base = (seed * 0x10001 + epoch * 0x9E3779B1 + 1) & _64_BITS
    keys = [_mix(number, base) for number in range(_ROUNDS)]
    while True:
        left = index >> half
        right = index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        index = (left << half) | right
        if index < size:
            return index
