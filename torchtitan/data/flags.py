"""Ids that a model reads but doesn't predict have one more bit, in rows and in token files."""

import numpy as np
from numpy.typing import NDArray

UNPREDICTED = 1 << 31
"""The bit. Ids themselves are far smaller."""
PLAIN = UNPREDICTED - 1
"""The bits of an id."""


def flagged(ids: NDArray[np.int64], predicted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Ids with the bit wherever they are not `predicted`."""
    return np.where(predicted, ids, ids | UNPREDICTED)
