"""Bits of ids beside the id, in rows and in token files."""

import numpy as np
from numpy.typing import NDArray

UNPREDICTED = 1 << 31
"""Of an id that the model reads but doesn't predict."""
CONTINUES = 1 << 30
"""Of an end-of-text that doesn't end its document, such as one that ends a turn."""
PLAIN = CONTINUES - 1
"""The bits of the id itself."""


def flagged(ids: NDArray[np.int64], flag: int, where: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Ids with a flag where `where` is true."""
    return np.where(where, ids | flag, ids)
