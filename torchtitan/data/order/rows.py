"""The one global order of rows, whichever rank reads them.

A step consumes G rows (the global batch). A row is `seq_len + 1` token ids; consecutive rows of a
source overlap by one id, so every id is predicted once, also where `seq_len` changes. Missing ids
at the end of finite data are `IGNORE_INDEX`. A source's reader delivers the rows that its rank
reads. The contents of a row depend neither on the other rows that a rank reads nor on the layout.

    token files   are cut into windows, which are shuffled (`windows`)
    text          the source has L lanes; a lane reads its own documents, one after another, and
                  cuts rows from [bos] text [eos] [bos] text [eos] ...; the position is one small
                  record per lane; or packs rows that begin with documents (`packing`)

The slot of a row in its step decides its lane, so a rank needs only the lanes of its slots. Where
ranks share a lane, each reads past the other's rows. Random-access text has as many lanes as the
batch has rows, a stream as many as its shards allow (`lanes`); in validation, neither depends on
the batch, so the rows of a whole set don't.

The source of a row is a function of (seed, weights, step, row) alone. At every step, each source
has had its share of the rows since its weights last changed, to within one row: the chairman
assignment problem (Tijdeman, "The chairman assignment problem", 1980). The k-th row of a source may
come once its share exceeds k - 1, and must have come when its share reaches k. Giving each slot to
the source whose row is due first always succeeds (Steiner and Yeomans, "Level schedules for
mixed-model, just-in-time processes", 1993).
"""

import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.order.packing import PackingStats
from torchtitan.data.read.positions import SharesState, SourcePosition

IGNORE_INDEX = -100
"""Label of positions that are not predicted."""

Row = NDArray[np.int64]
"""`[seq_len + 1]` token ids, some of which may be flagged (`tokenizer.UNPREDICTED`)."""
Share = tuple[tuple[int, int], ...]
"""The rows of a step that a reader delivers. A pair `(index, count)` chooses one of `count` equal
ranges of rows; the next pair divides that range further.
"""
_ROUNDS = 4
_GOLDEN = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1


class SourceReader(ABC):
    """Reads a share of the rows of one source."""

    ended = True
    """Whether rows that are missing in a step are missing in all later ones, too."""
    rows = tokens = 0
    """The amount that all ranks have read."""

    def count_rows(self, rows: int, length: int) -> None:
        self.rows += rows
        self.tokens += rows * length

    @abstractmethod
    def read(self, step: int, count: int, slots: NDArray[np.int64], length: int) -> dict[int, Row]:
        """This reader's rows of a step by their slots; empty after the source's end.

        Args:
            step: counted from 0.
            count: rows of the step, over all sources and ranks.
            slots: the slots of this source's rows in the step, ascending.
            length: `seq_len` of the step.
        """

    def remaining_rows(self, length: int) -> int | None:
        """Rows of a length until the source ends; None if it doesn't."""
        return None

    @property
    def packing_stats(self) -> PackingStats:
        """The cost of packing since this reader began."""
        return PackingStats()

    @property
    @abstractmethod
    def epochs(self) -> float:
        """Epochs of the source that were read; for text, the mean over this reader's lanes."""

    @abstractmethod
    def position(self) -> SourcePosition:
        """The position after the last step, with this reader's lanes."""

    @abstractmethod
    def seek(self, position: SourcePosition) -> None:
        """Continue from a position with all lanes."""


def local_rows(count: int, share: Share) -> range:
    """The rows of a step of `count` that a share delivers."""
    rows = range(count)
    for index, of in share:
        first = rows.start + len(rows) * index // of
        after = rows.start + len(rows) * (index + 1) // of
        rows = range(first, after)
    return rows


def blank_row(seq_len: int) -> Row:
    """A row without labels."""
    return np.full(seq_len + 1, IGNORE_INDEX)


def pad_row(ids: Row, seq_len: int) -> Row:
    """A row, without labels where ids are missing."""
    row = blank_row(seq_len)
    row[: len(ids)] = ids
    return row


@dataclass
class Shares:
    """Divides rows among sources by weight, exactly: counts and weights are integers."""

    weights: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    """Rows divided since the weights last changed."""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows of each source since the weights last changed."""
    _target: Mapping[str, Fraction] | None = None
    """The fractions behind `weights`; None: unknown."""

    def aim(self, weights: Mapping[str, Fraction]) -> None:
        """Divide by `weights` from now on."""
        if weights == self._target:
            return
        self._target = weights
        whole = _integer_ratio(weights)
        if whole != self.weights:
            self.weights = whole
            self.rows = 0
            self.counts = dict.fromkeys(whole, 0)

    def take(self, rows: int) -> dict[str, int]:
        """Number of rows from each source among the next `rows`."""
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
        counts = {name: now[name] - self.counts[name] for name in now}
        self.counts = now
        return counts

    def position(self) -> SharesState:
        return SharesState(weights=self.weights, rows=self.rows, counts=self.counts)

    def seek(self, position: SharesState) -> None:
        self._target = None
        self.weights = position.weights
        self.rows = position.rows
        self.counts = position.counts


def _integer_ratio(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Integers in the ratio of `weights`, without sources of weight zero."""
    positive = {name: weight for name, weight in weights.items() if weight > 0}
    above = math.gcd(*(weight.numerator for weight in positive.values()))
    below = math.lcm(*(weight.denominator for weight in positive.values()))
    return {name: int(weight * below / above) for name, weight in positive.items()}


def divide(
    shares: Shares, weights: Mapping[str, Fraction], rows: int, limits: Mapping[str, int]
) -> dict[str, int]:
    """Number of rows from each source among the next `rows`.

    Args:
        weights: the weights of all sources at this step.
        limits: remaining rows of the sources that end. From the step in which one ends, the others
            share its weight.

    Returns:
        Fewer than `rows` in total if all sources end.
    """
    limits = dict(limits)
    totals = dict.fromkeys(weights, 0)
    while rows:
        shares.aim({name: weight for name, weight in weights.items() if limits.get(name, 1) > 0})
        if not shares.weights:
            break
        before = shares.position()
        counts = shares.take(rows)
        ending = {name for name, count in counts.items() if count > limits.get(name, count)}
        if ending:
            shares.seek(before)
            counts = {name: limits[name] for name in counts if name in ending}  # their last rows
        for name, count in counts.items():
            totals[name] += count
            rows -= count
            if name in limits:
                limits[name] -= count
    return totals


def scatter(counts: Mapping[str, int], seed: int, step: int) -> dict[str, NDArray[np.int64]]:
    """The slots of each source's rows in a step, ascending; scattered over the batch, so that all
    ranks get some.
    """
    total = sum(counts.values())
    present = [name for name, count in counts.items() if count]
    if len(present) == 1:
        return {present[0]: np.arange(total)}
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
    plans: Sequence[BatchPlan], limits: Mapping[str, int], steps: range
) -> dict[str, int]:
    """The step in which each source gives its last row, to within a row, if it is one of `steps`.

    Args:
        limits: remaining tokens, before the first of `steps`, of the sources that end.
    """
    budgets = {name: Fraction(tokens) for name, tokens in limits.items()}
    exhausted: dict[str, int] = {}
    now = Fraction(steps.start)
    for plan, after in _plans_with_ends(plans):
        end = min(after, steps.stop)
        while now < end:
            weights = {
                name: weight
                for name, weight in plan.weights.items()
                if weight > 0 and name not in exhausted
            }
            if not weights:
                return exhausted
            per_step = {
                name: plan.tokens * weight / sum(weights.values())
                for name, weight in weights.items()
            }
            until = {
                name: now + budgets[name] / rate
                for name, rate in per_step.items()
                if name in budgets
            }
            change = min([Fraction(end), *until.values()])
            for name in until:
                budgets[name] -= (change - now) * per_step[name]
            now = change
            exhausted |= {
                name: max(math.ceil(now) - 1, steps.start) for name in until if until[name] == now
            }
    return exhausted


def planned_tokens(plans: Sequence[BatchPlan], steps: int) -> Counter[str]:
    """Tokens that each source gives in this many steps, if none ends."""
    planned: Counter[str] = Counter()
    for plan, after in _plans_with_ends(plans):
        tokens = max(0, min(after, steps) - plan.first) * plan.tokens
        for name, weight in plan.weights.items():
            planned[name] += int(tokens * weight / sum(plan.weights.values()))
    return planned


def whole_steps(plans: Sequence[BatchPlan], tokens: int, first: int) -> int:
    """Number of steps, from `first` on, for which `tokens` tokens are enough."""
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
        high = index >> half
        low = index & mask
        for key in keys:
            high, low = low, high ^ (_mix(low, key) & mask)
        index = (high << half) | low
        if index < size:
            return index
