"""Use of a vocabulary by data, and the cost of text without vocabulary entries."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.tokenizer import HuggingFaceTokenizer, Tokenizer

_FREQUENT = 20
_UNSEEN = 40
"""Maximum number of entries listed."""
_COVERED = (0.5, 0.9, 0.99)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Vocabulary:
    """A tokenizer's entries."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.sizes = tokenizer.byte_lengths()
        """Bytes of each entry; 0 for special ones."""
        self.text = cache(self._text)

    @property
    def entries(self) -> int:
        """Number of entries that stand for text."""
        return int((self.sizes > 0).sum())

    def _text(self, id: int) -> str:
        return self.tokenizer.decode([id])

    def is_fragment(self, id: int) -> bool:
        """Whether an entry is a fragment of a character, from a byte fallback or a byte-level
        vocabulary.
        """
        return _REPLACEMENT in self.text(id)

    @property
    def unknown(self) -> int | None:
        """The entry for text that the vocabulary can't encode; None if it can encode all."""
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            return None
        name = getattr(self.tokenizer.backend.model, "unk_token", None)
        return self.tokenizer.backend.token_to_id(name) if name else None

    def use(self, read: NDArray[np.int64], counts: NDArray[Any]) -> dict[str, Any]:
        """Use of the entries by data, ready for JSON.

        Args:
            read: number of times each entry was read.
            counts: estimated occurrences of each entry in all documents.
        """
        total = max(float(counts.sum()), 1e-300)
        plain = self.sizes > 0
        seen = np.flatnonzero((read > 0) & plain)
        unseen = np.flatnonzero((read == 0) & plain).tolist()
        unseen.sort(key=self.is_fragment)  # whole characters first
        ordered = seen[np.argsort(-counts[seen], kind="stable")]
        reached = np.cumsum(counts[ordered]) / max(float(counts[seen].sum()), 1e-300)
        fragments = [id for id in seen.tolist() if self.is_fragment(id)]
        sizes = counts * self.sizes
        unknown = self.unknown
        return {
            "entries": self.entries,
            "seen": len(seen),
            "covering": {
                f"{share:.0%}": int(np.searchsorted(reached, share)) + 1
                for share in _COVERED
                if len(seen)
            },
            "frequent": [
                {"id": id, "text": self.text(id), "share": float(counts[id]) / total}
                for id in ordered[:_FREQUENT].tolist()
            ],
            "unseen": [{"id": id, "text": self.text(id)} for id in unseen[:_UNSEEN]],
            "parts": {
                "tokens": float(counts[fragments].sum()) / total,
                "bytes": float(sizes[fragments].sum()) / max(float(sizes.sum()), 1e-300),
            },
            "unknown": None if unknown is None else float(counts[unknown]) / total,
        }
