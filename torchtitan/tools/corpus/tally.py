"""Totals of a source as it is read: a row for each document, and counts of each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.tools.corpus.columns import WHOLE, DocumentColumns, Drawn, Estimate

_MAX_LENGTHS = 2**20
"""Maximum number of documents with stored lengths; beyond it, a random sample is stored."""
_HASHES = 2**24
"""Maximum number of documents for which duplicates are counted."""


class Tally:
    """Adds up documents."""

    def __init__(self, vocab_size: int, seed: int):
        self.read = np.zeros(vocab_size, np.int64)
        """How often each token was read."""
        self.counts = np.zeros(vocab_size)
        """Estimated number of occurrences of each token in all documents."""
        self.bad: dict[str, float] = {}
        """Estimated number of bad documents by kind."""
        self.first_bad: str | None = None
        self.totals = np.zeros(3, np.int64)
        """Documents, tokens and bytes that were read."""
        self._rng = np.random.default_rng(seed)
        self._rows: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._drawn: list[Drawn] = []
        self._num_lengths = 0
        self._share = 1
        """One in this number of whole documents has a row."""
        self._hashes: list[NDArray[Any]] | None = []

    def add(
        self,
        ids: NDArray[Any],
        lengths: NDArray[Any],
        sizes: NDArray[Any],
        hashes: NDArray[Any] | None = None,
    ) -> None:
        """Add whole documents.

        Args:
            ids: tokens of all documents, one document after another.
            lengths: number of tokens of each document.
            sizes: bytes of each text.
            hashes: hashes of the texts; None if unknown.
        """
        occurrences = np.bincount(ids, minlength=len(self.read))
        self.read += occurrences
        self.counts += occurrences
        self.totals += (len(lengths), len(ids), int(sizes.sum()))
        if self._share > 1:
            sampled = self._rng.random(len(lengths)) * self._share < 1
            lengths, sizes = lengths[sampled], sizes[sampled]
        self._rows.append((lengths, sizes))
        self._num_lengths += len(lengths)
        while self._num_lengths > _MAX_LENGTHS:
            self._halve()
        if hashes is None or self.totals[0] > _HASHES:
            self._hashes = None
        elif self._hashes is not None:
            self._hashes.append(hashes)

    def _halve(self) -> None:
        rows = np.array([np.concatenate(column) for column in zip(*self._rows, strict=True)])
        rows = rows[:, self._rng.random(rows.shape[1]) < 0.5]
        self._rows = [(rows[0], rows[1])]
        self._num_lengths = rows.shape[1]
        self._share *= 2

    def add_drawn(self, ids: NDArray[Any], size: int, drawn: Sequence[Drawn]) -> None:
        """Add a document that was drawn, or a blank line or bad document (no ids).

        Args:
            size: bytes of the text that was read.
            drawn: sampling data for each time it was drawn.
        """
        occurrences = np.bincount(ids, minlength=len(self.read))
        self.read += occurrences
        self.totals += (1 if len(ids) else 0, len(ids), size)
        self.counts += occurrences * sum(draw.weight * draw.scale for draw in drawn)
        for draw in drawn:
            row = (np.array([round(len(ids) * draw.scale)]), np.array([round(size * draw.scale)]))
            self._rows.append(row)
            self._drawn.append(draw)
        self._hashes = None

    def add_bad(self, kind: str, problem: str, drawn: Sequence[Drawn] = (WHOLE,)) -> None:
        """Add a bad document."""
        self.bad[kind] = self.bad.get(kind, 0) + sum(draw.weight for draw in drawn)
        self.first_bad = self.first_bad or problem

    def columns(self) -> DocumentColumns:
        """The rows as columns."""
        columns = list(zip(*self._rows, strict=True)) or [(), ()]
        tokens, sizes = (np.concatenate(column) if column else np.zeros(0) for column in columns)
        drawn = self._drawn or [WHOLE._replace(weight=float(self._share))] * len(tokens)
        return DocumentColumns.from_draws(tokens, sizes, drawn)

    @property
    def is_drawn(self) -> bool:
        """Whether documents were drawn at random."""
        return any(draw.how != "all" for draw in self._drawn)

    def sums(self, columns: DocumentColumns) -> list[Estimate]:
        """Documents, tokens and bytes of the whole source.

        Args:
            columns: result of `columns`.
        """
        if not self.is_drawn:
            return [Estimate(float(total), 0.0) for total in self.totals]
        return [columns.total(each) for each in (columns.documents, columns.tokens, columns.bytes)]

    def duplicates(self) -> dict[str, int] | None:
        """Number and bytes of the documents that equal an earlier one; None if not counted."""
        if not self._hashes:
            return None
        hashes = np.concatenate(self._hashes)
        hashes = hashes[np.argsort(hashes["hash"], kind="stable")]
        is_repeat = hashes["hash"][1:] == hashes["hash"][:-1]
        return {
            "documents": int(is_repeat.sum()),
            "bytes": int(hashes["bytes"][1:][is_repeat].sum()),
        }


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a source."""

    sample: int | None
    """Approximate number of documents of each source; None reads everything."""
    seed: int
    workers: int


@dataclass(frozen=True)
class Reading:
    """Result of reading a source."""

    tally: Tally
    kind: str
    """Kind of the source, in words."""
    size: int | None
    """Size of its files in bytes; None without files."""
    tokens: int | None = None
    """Number of tokens, if known without reading."""
    report: dict[str, Any] | None = None
    """Counts from `torchtitan tokenize`; None without a report."""
    is_stream: bool = False
    """Whether only the first documents of a stream were read."""
    ignored: dict[str, Any] | None = None
    """Files beside the documents, see `files.Ignored.as_data`; None without files of documents."""
