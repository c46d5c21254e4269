"""Parameters and linear layers that tensor parallelism gives a style of their own.

Shapes: b batch, s sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PerHead(nn.Module):
    """A parameter with an entry, or some entries, for each head: `forward() -> [heads, ...]`.

    It is a module so that tensor parallelism can give it a style, `PER_HEAD`: each rank then holds
    and returns the entries of its own heads.
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        return self.weight


class TokenLinear(nn.Module):
    """A linear layer whose output heads share: `[b, s, inputs] -> [b, s, outputs]`.

    Tensor parallelism has each rank apply all of it to its own tokens (style `GATE`).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, *self.parameters())

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output, with these in place of its parameters."""
        return F.linear(x, weight, bias)
