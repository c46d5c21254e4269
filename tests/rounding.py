"""Comparisons of two correct programs by what rounding explains on any machine, not by what one
machine gave.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan.testing.difference import rounding

SMALL_SHARE = 0.01


def assert_rounds(
    ours: Any,
    theirs: Any,
    terms: int = 4096,
    chain: int = 12,
    *,
    dtype: torch.dtype = torch.float32,
    of: str = "",
) -> None:
    """Tensors, or tuples of them, differ by rounding, relative to the largest element of each of
    `theirs`.

    Args:
        terms, chain: as in `rounding`. By default those of a small model with its loss and
        backward.
        of: what is compared, for the message.
    """
    if isinstance(theirs, Sequence):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_rounds(one, other, terms, chain, dtype=dtype, of=f"{of} [{i}]")
        return
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), of
    off = (ours.double() - theirs.double()).abs().max().item()
    limit = rounding(terms, chain, dtype) * theirs.abs().max().item()
    assert off <= limit, f"{of}: off by {off:.1e}, and rounding explains {limit:.1e}"


def assert_trained_alike(ours: Tensor, theirs: Tensor, lr: float, steps: int, of: str = "") -> None:
    """A weight is the same after training in two layouts, but for a few elements.

    Adam divides a gradient by its size. Where one is less than 100 times its rounding, of about
    1e-4 of the usual size, two updates may differ by more than 1 % of the learning rate. That is at
    most 1 % of elements, or one.
    """
    moved = ((ours.double() - theirs.double()).abs() > SMALL_SHARE * lr * steps).sum().item()
    allowed = max(1, int(SMALL_SHARE * theirs.numel()))
    assert moved <= allowed, (
        f"{of}: {moved} of {theirs.numel()} elements differ by more than 1 % of {steps} updates"
    )


@contextmanager
def fp32_products(*modules: Any) -> Iterator[list[str]]:
    """On the CPU, `modules` multiply bf16 to fp32 as on CUDA. Yields the operations that did it."""
    calls = []

    def mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        calls.append("mm")
        return a.to(dtype) @ b.to(dtype)

    def addmm(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        calls.append("addmm")
        return torch.addmm(total, a.to(dtype), b.to(dtype), out=out)

    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as on:
        on.impl("mm.dtype", mm, "CPU")
        on.impl("addmm.dtype_out", addmm, "CPU")
        for module in modules:
            patch.setattr(module, "multiplies_to_fp32", lambda x: x.dtype == torch.bfloat16)
        yield calls
