"""Near-duplicates: documents that share most of their sequences of five words.

The words of a text are lower-cased, without punctuation; each Chinese, Japanese or Korean character
is a word. MinHash (Broder, 1997), by the package rensa, keeps `bands x rows` minima of the set of
all sequences of `WORDS` words. Two documents are near-duplicates if they agree on all rows of a
band, which has a probability of 1 - (1 - s^rows)^bands if their sets have Jaccard similarity s
(Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4).
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchtitan.data.encode.tokenizer import pieces
from torchtitan.utils.errors import UserError

WORDS = 5
HASHES = 128
"""Maximum number of minima."""
MIN_PROBABILITY = 0.9
"""Smallest accepted probability of finding a pair of the requested similarity."""
_SEED = 1
_ALONE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")


@dataclass(frozen=True)
class NearDuplicates:
    """Makes keys of documents; near-duplicates have a key in common."""

    bands: int
    rows: int

    @classmethod
    def for_similarity(cls, similarity: float) -> "NearDuplicates":
        """Keys that find pairs of this Jaccard similarity with `MIN_PROBABILITY`, and as few false
        pairs as possible: those of the most rows.

        Raises:
            UserError: the package rensa isn't installed.
        """
        if importlib.util.find_spec("rensa") is None:
            raise UserError(
                "--drop-near-duplicates needs the package rensa: pip install "
                "'titan-pretrain[near-duplicates]'"
            )
        for rows in range(HASHES, 1, -1):
            candidate = cls(HASHES // rows, rows)
            if candidate.probability(similarity) >= MIN_PROBABILITY:
                return candidate
        return cls(HASHES, 1)

    def probability(self, similarity: float) -> float:
        """Probability that two documents of this Jaccard similarity are near-duplicates."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    @property
    def fingerprint(self) -> str:
        """Equal only for keys that can be compared."""
        from rensa import RMinHash

        return f"{self.bands} x {self.rows} rows, rensa {RMinHash.ALGORITHM_VERSION}"

    def keys(self, text: str) -> list[int]:
        """64-bit keys of a document, one per band."""
        from rensa import RMinHash

        sketch = RMinHash(self.bands * self.rows, _SEED)
        for sequences in _sequences(text):
            sketch.update(sequences)
        minima = np.array(sketch.digest(), "<u4").reshape(self.bands, self.rows)
        keys = []
        for band, row in enumerate(minima):
            digest = hashlib.blake2b(row.tobytes(), digest_size=8, person=b"band %d" % band)
            keys.append(int.from_bytes(digest.digest(), "little"))
        return keys


def _sequences(text: str) -> Iterator[list[str]]:
    """All sequences of `WORDS` words, piece by piece; of a shorter text, itself."""
    words: list[str] = []
    any_sequence = False
    for piece in pieces(text):
        words += _WORD.findall(piece.lower())
        sequences = [" ".join(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)]
        if sequences:
            any_sequence = True
            yield sequences
        words = words[-WORDS + 1 :]
    if not any_sequence:
        yield [" ".join(words) or text]
