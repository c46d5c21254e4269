"""Attention as models call it: a function of queries, keys, values and `Scores`.

Shapes: b batch, s queries, S keys, h query heads, k key-value heads, d width of queries and keys,
e width of values.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

Mask = Any
"""Result of `document_mask`: a tensor `[b, 1, s, S]`, true where a query may see a key;
`PackedDocuments`; `WindowMasks`; or a `DocumentMask` with one of them.
"""


class WindowMasks(NamedTuple):
    """FlexAttention's `BlockMask`s, each for the layers with one window."""

    windows: tuple[int | None, ...]
    """Windows shorter than the row; None: the whole row."""
    masks: tuple[Any, ...]


def windows_of(models: Iterable[nn.Module]) -> tuple[int | None, ...]:
    """The windows of all layers, which a model lists in an attribute `windows`; None: a layer has
    none.
    """
    windows_by_model = [getattr(model, "windows", (None,)) for model in models]
    return tuple(dict.fromkeys(window for windows in windows_by_model for window in windows))


class DocumentMask(NamedTuple):
    """A mask and its documents, for models that mix tokens not only by attention
    (`reads_documents`).
    """

    mask: Mask
    documents: Tensor
    """`[b, s]`, the document of each token that this rank holds, on the compute device."""


def reads_documents(model: nn.Module) -> bool:
    """Whether a model, or a mixer in it, asks for a `DocumentMask` by an attribute of this name."""
    return bool(getattr(model, "reads_documents", False))


class Scores(NamedTuple):
    """The mask and the scale of the scores, the products of queries and keys.

    A query never sees a later key. Code that computes scores unpacks all fields, so that a new
    field is an error until that code supports it.
    """

    mask: Mask | None = None
    """Keys that each query may see, apart from the window and causality. None: all."""
    window: int | None = None
    """A query sees the key at its own position and the `window - 1` keys before it. None: all
    before it.
    """
    scale: float | None = None
    """Factor of the scores. None: `d ** -0.5`."""
    offset: int | None = 0
    """Position of the first query among the keys. None: unknown; a mask of a tensor alone decides,
    and there must be no window.
    """

    def masked(self, mask: Mask | None) -> "Scores":
        """These scores under a mask."""
        # Not `_replace`: a compiled layer must be guarded by each field.
        return Scores(mask, self.window, self.scale, self.offset)

    def at_offset(self, offset: int | None) -> "Scores":
        """These scores for queries that begin at position `offset` of the keys."""
        return Scores(self.mask, self.window, self.scale, offset)

    def scaled(self, width: int) -> "Scores":
        """These scores with a scale, for queries and keys of this width."""
        scale = width**-0.5 if self.scale is None else self.scale
        return Scores(self.mask, self.window, scale, self.offset)

    def clip_window(self, count: int) -> "Scores":
        """These scores without a window that spans all `count` keys."""
        window = None if self.window is not None and self.window >= count else self.window
        return Scores(self.mask, window, self.scale, self.offset)


CAUSAL = Scores()
"""Every query sees all keys up to its own position."""


class Attend(Protocol):
    """Attention: q `[b, h, s, d]`, k `[b, k, s, d]`, v `[b, k, s, e]` -> `[b, h, s, e]`.

    Args:
        sinks: `[h]`, learned logits that take part in each head's softmax and have no value.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor: ...
