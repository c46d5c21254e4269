"""Significance of differences between noisy curves.

The values of successive steps are not independent, so the standard error of their mean can't be
taken from their variance. The values are divided into `BLOCKS` successive blocks, and the means of
the blocks are treated as a sample of a normal distribution: Student's t-test on them holds for any
autocorrelation shorter than a block, and for variances that change (R. Ibragimov, U. K. Müller:
"t-statistic based correlation and heterogeneity robust inference", Journal of Business & Economic
Statistics 28(4), 2010). Where the autocorrelation is too long for that, there is no verdict.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from statistics import fmean, linear_regression, median, stdev
from typing import NamedTuple

BLOCKS = 10
_T = 2.262
"""Student's t for 95 % with `BLOCKS - 1` degrees of freedom."""
_MIN_INDEPENDENT = 4 * BLOCKS
"""Independent values from which the means of blocks are nearly independent. Simulated: 4 to 8 %
of series without a difference then get a significant one, at any autocorrelation
(tests/unit/test_report_compare.py).
"""


class Gap(NamedTuple):
    """A difference between two runs, with its noise."""

    value: float
    noise: float | None
    """Half the width of the 95 % confidence interval; None if unknown."""

    @property
    def significant(self) -> bool:
        """Whether it is more than noise."""
        return self.noise is not None and abs(self.value) > self.noise


def mean_gap(differences: Sequence[float]) -> Gap:
    """The mean of differences between values at the same points of two curves, in order."""
    if not differences:
        return Gap(math.nan, None)
    noise = None
    if independent_values(differences) >= _MIN_INDEPENDENT:
        noise = _interval([fmean(block) for block in blocks(differences)])
    return Gap(fmean(differences), noise)


def gap_in_ranges(series: Mapping[float, float], base: Mapping[float, float]) -> Gap:
    """Mean difference of two curves over their common range, for curves with few common points.

    Args:
        series, base: values by point.
    """
    first = max(min(series), min(base))
    last = min(max(series), max(base))
    by_range = _ranges(series, first, last)
    base_by_range = _ranges(base, first, last)
    values = list(chain(*by_range))
    base_values = list(chain(*base_by_range))
    if not values or not base_values:
        return Gap(math.nan, None)
    independent = min(independent_values(values), independent_values(base_values))
    if independent < _MIN_INDEPENDENT or not all(by_range) or not all(base_by_range):
        return Gap(fmean(values) - fmean(base_values), None)
    means = [fmean(a) - fmean(b) for a, b in zip(by_range, base_by_range, strict=True)]
    return Gap(fmean(means), _interval(means))


def _ranges(series: Mapping[float, float], first: float, last: float) -> list[list[float]]:
    """Values from `first` to `last` in order, in `BLOCKS` equal ranges of points."""
    ends = [first + (last - first) * i / BLOCKS for i in range(1, BLOCKS)]
    by_range: list[list[float]] = [[] for _ in range(BLOCKS)]
    for at, value in sorted(series.items()):
        if first <= at <= last:
            by_range[bisect_left(ends, at)].append(value)
    return by_range


def median_gap(values: Sequence[float], base: Sequence[float]) -> Gap:
    """The difference of the medians of two series in order; the medians of blocks give the noise.

    Medians, because single values may be far off, such as of a step that waited for storage.

    Args:
        values, base: one value or more each.
    """
    difference = median(values) - median(base)
    halves = []
    for series in (values, base):
        if independent_values(_clip(series)) < _MIN_INDEPENDENT:
            return Gap(difference, None)
        halves.append(_interval([median(block) for block in blocks(series)]))
    return Gap(difference, math.hypot(*halves))


def _clip(values: Sequence[float]) -> list[float]:
    """Values with the outer 5 % at each end clipped: outliers would hide correlation."""
    by_size = sorted(values)
    low = by_size[len(values) // 20]
    high = by_size[-1 - len(values) // 20]
    return [min(max(value, low), high) for value in values]


def blocks(values: Sequence[float]) -> list[Sequence[float]]:
    """`values` in `BLOCKS` successive blocks of nearly the same length."""
    ends = [round(i * len(values) / BLOCKS) for i in range(BLOCKS + 1)]
    return [values[begin:end] for begin, end in pairwise(ends)]


def _interval(means: Sequence[float]) -> float:
    return _T * stdev(means) / math.sqrt(len(means))


def independent_values(values: Sequence[float]) -> float:
    """Effective number of independent values for estimating the mean: n (1 - r) / (1 + r).

    r is the correlation of successive values, after a linear trend is taken out, corrected for its
    bias in short series (F. H. C. Marriott and J. A. Pope, Biometrika 41, 1954).
    """
    n = len(values)
    if n < 3:
        return 0.0
    slope, intercept = linear_regression(range(n), values)
    residuals = [v - intercept - slope * i for i, v in enumerate(values)]
    variance = sum(v * v for v in residuals)
    rounding = 1e-12 * (abs(fmean(values)) + abs(slope) * n)
    if variance <= rounding**2 * n:  # no noise at all
        return float(n)
    r = sum(a * b for a, b in pairwise(residuals)) / variance
    corrected = r + (1 + 4 * r) / n
    r = min(max(corrected, 0.0), 0.9999)
    return n * (1 - r) / (1 + r)


def smooth(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Exponential moving averages with weights that sum to one; gaps stay gaps.

    Args:
        weight: weight of past values, from 0 (no smoothing) to below 1.
    """
    total = 0.0
    norm = 0.0
    averages: list[float | None] = []
    for value in values:
        if value is None:
            averages.append(None)
            continue
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        averages.append(total / norm)
    return averages
