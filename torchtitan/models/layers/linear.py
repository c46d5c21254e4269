"""Parameters and linear layers with a separate style of tensor parallelism.

Shapes: b batch, s sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PerHead(nn.Module):
    """A parameter with an entry, or some entries, for each head: `forward() -> [heads, ...]`.

    It is a module so that tensor parallelism can give it a style, `PER_HEAD`: each rank then holds
    and returns its heads' entries.
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        return self.weight


class TokenLinear(nn.Module):
    """A linear layer whose output all heads share: `[b, s, inputs] -> [b, s, outputs]`.

    Under tensor parallelism, each rank applies the whole layer to its tokens (style `GATE`).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, *self.parameters())

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output with this weight and bias instead of its parameters."""
        return F.linear(x, weight, bias)


def multiplies_to_fp32(operand: Tensor) -> bool:
    """Whether `torch.mm` and `addmm` take operands like this one in bf16 and return fp32: no sum is
    rounded to bf16, at the speed of bf16.
    """
    return operand.dtype == torch.bfloat16 and operand.is_cuda and torch.version.hip is None
