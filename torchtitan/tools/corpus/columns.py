"""Documents as columns, read whole or drawn at random, and estimates for all documents.

A drawn document stands for `weight` others. Totals are sums with these weights (Hansen and Hurwitz,
"On the theory of sampling from finite populations", 1943); ratios are ratios of totals. Errors
follow from how much the drawn units differ, a ratio's from its residuals (Cochran, "Sampling
Techniques", 1977, section 6.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
NORMAL = 1.96
"""Standard errors in half of a 95 % confidence interval."""
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Estimate(NamedTuple):
    """A number with half the width of its 95 % confidence interval, which is 0 if exact."""

    value: float
    noise: float


class Drawn(NamedTuple):
    """Sampling data of a document (or blank line) that was read."""

    weight: float
    """Number of documents that it stands for."""
    raw: float
    """Size in its file: bytes, or tokens of a token file."""
    unit: int
    """Number of its sampling unit; documents of a unit were drawn together."""
    how: Literal["all", "places", "beginnings"]
    """Sampling method, see `sampling`."""
    scale: float = 1.0
    """Size of the document relative to the text that was read of it."""


WHOLE = Drawn(weight=1.0, raw=0.0, unit=0, how="all")
"""Sampling data of a document that stands only for itself."""


@dataclass(frozen=True)
class DocumentColumns:
    """Columns with a row for each document, blank line or bad document that was read."""

    documents: Array
    """1, or 0 for a blank line or a bad document."""
    tokens: Array
    bytes: Array
    weight: Array
    raw: Array
    unit: Array
    how: Array

    @classmethod
    def from_draws(cls, tokens: Array, sizes: Array, drawn: Sequence[Drawn]) -> "DocumentColumns":
        """
        Args:
            tokens: tokens of each row; 0 if it is no document.
            sizes: bytes of each text.
            drawn: sampling data of each row.
        """
        counts = np.asarray(tokens, np.int64)
        return cls(
            documents=(counts > 0).astype(np.int64),
            tokens=counts,
            bytes=np.asarray(sizes, np.int64),
            weight=np.array([draw.weight for draw in drawn]),
            raw=np.array([draw.raw for draw in drawn]),
            unit=np.array([draw.unit for draw in drawn], np.int64),
            how=np.array([draw.how for draw in drawn], "U10"),
        )

    def total(self, values: Array) -> Estimate:
        """Estimated sum of `values` over all documents."""
        sampled = self.weight * values
        variance = 0.0
        for rows in self._sampling_methods():
            raw = (self.weight * self.raw)[rows]
            sum_of_raw = raw.sum()
            rate = sampled[rows].sum() / sum_of_raw if sum_of_raw else 0.0
            variance += self._variance(rows, sampled[rows] - rate * raw)
        return Estimate(float(sampled.sum()), NORMAL * variance**0.5)

    def ratio(self, above: Array, below: Array) -> Estimate | None:
        """Estimated ratio of two sums over all documents; None if the denominator is zero."""
        bottom = float((self.weight * below).sum())
        if not bottom:
            return None
        value = float((self.weight * above).sum()) / bottom
        residuals = self.weight * (above - value * below)
        variance = sum(self._variance(rows, residuals[rows]) for rows in self._sampling_methods())
        return Estimate(value, NORMAL * variance**0.5 / bottom)

    def _sampling_methods(self) -> list[Array]:
        """A mask of rows for each random sampling method."""
        return [self.how == method for method in ("places", "beginnings")]

    def _variance(self, rows: Array, residuals: Array) -> float:
        """Variance of the sum of the residuals of independent units."""
        _, units = np.unique(self.unit[rows], return_inverse=True)
        sums = np.bincount(units, residuals)
        if len(sums) == 1:  # a single file: its documents are all that there is to compare
            sums = residuals
        count = len(sums)
        return float(count / (count - 1) * ((sums - sums.mean()) ** 2).sum()) if count > 1 else 0.0

    # ---- the distribution over documents

    def percentiles(self, values: Array) -> dict[str, float]:
        """Percentiles by percent, and `min`, `max` and `mean`; empty without documents."""
        at = self.documents > 0
        if not at.any():
            return {}
        order = np.argsort(values[at], kind="stable")
        sorted_values = values[at][order]
        weights = self.weight[at][order]
        reached = np.cumsum(weights) / weights.sum()
        values_at = {}
        for percent in PERCENTILES:
            index = min(int(np.searchsorted(reached, percent / 100)), len(reached) - 1)
            values_at[str(percent)] = float(sorted_values[index])
        ends = {"min": float(sorted_values[0]), "max": float(sorted_values[-1])}
        return values_at | ends | {"mean": float(np.average(sorted_values, weights=weights))}

    def longer_than(self, length: int) -> dict[str, float]:
        """Share of the documents, and of the tokens in them, with more than `length` tokens."""
        long = self.tokens > length
        weights = self.weight * self.documents
        tokens = self.weight * self.tokens
        return {
            "documents": float(weights[long].sum() / max(weights.sum(), 1e-300)),
            "tokens": float(tokens[long].sum() / max(tokens.sum(), 1e-300)),
        }

    def histogram(self) -> list[dict[str, float]]:
        """Shares of documents and tokens by length in tokens: `from` 2^i, `to` below twice that."""
        at = self.documents > 0
        if not at.any():
            return []
        powers = np.frexp(self.tokens[at].astype(float))[1] - 1
        weights = self.weight[at]
        documents = np.bincount(powers, weights)
        tokens = np.bincount(powers, weights * self.tokens[at])
        return [
            {
                "from": 2**power,
                "to": 2 ** (power + 1) - 1,
                "documents": float(documents[power] / documents.sum()),
                "tokens": float(tokens[power] / tokens.sum()),
            }
            for power in range(int(powers.min()), int(powers.max()) + 1)
        ]
