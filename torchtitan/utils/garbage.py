"""Python's garbage collector during training."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Turn automatic collection off: it strikes ranks at different times, and each makes all others
    wait.

    Collect explicitly instead, on all ranks after the same step. Objects that exist now are never
    scanned.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
