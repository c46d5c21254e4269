"""A fake process group whose collectives copy what this rank has, in every release of torch.

The fake backend leaves the outputs of some collectives uninitialized: in torch 2.11 those of
all-to-all and reduce-scatter. Counts of rows that arrive this way are then any number, on which a
kernel fails, and gradients are not finite, so that the optimizer skips its work. Releases differ in
what they copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def copying_collectives() -> Iterator[None]:
    """In the body, all-to-all and reduce-scatter copy as many rows as input and output have in
    common, and fill the rest with zeros. Other collectives are the fake backend's: an all-gather
    copies, an all-reduce leaves its input as it is.
    """
    import torch
    import torch.distributed as dist

    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        library.impl("all_to_all_single", _all_to_all, device)
        library.impl("reduce_scatter_tensor", _reduce_scatter, device)
    try:
        with patch.object(dist, "reduce_scatter_tensor", _reduce_scatter_into):  # FSDP's
            yield
    finally:
        library._destroy()


def _common_rows(source: Any, out: Any) -> Any:
    """Fill `out` with the first rows of `source`, then zeros."""
    rows = min(len(source), len(out))
    out[:rows].copy_(source[:rows])
    out[rows:].zero_()
    return out


def _all_to_all(source: Any, received: list[int], sent: list[int], group: str) -> Any:
    rows = sum(received) if received else len(source)
    return _common_rows(source, source.new_empty(rows, *source.shape[1:]))


def _reduce_scatter(source: Any, reduction: str, ranks: int, group: str) -> Any:
    return source[: len(source) // ranks].clone()


def _reduce_scatter_into(
    output: Any, input: Any, *_: Any, async_op: bool = False, **__: Any
) -> "_Done | None":
    _common_rows(input, output)
    return _Done() if async_op else None


class _Done:
    """Replaces `dist.Work`."""

    def wait(self, *_: Any) -> bool:
        return True
