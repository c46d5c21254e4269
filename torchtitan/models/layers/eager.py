"""Whether a layer may define its own backward."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def runs_eagerly(x: Tensor) -> bool:
    """Whether operations on `x` run as they are called: outside the compiler, which fuses them, and
    not on a DTensor, which has a rule for each.
    """
    return not torch.compiler.is_compiling() and not is_traceable_wrapper_subclass(x)
