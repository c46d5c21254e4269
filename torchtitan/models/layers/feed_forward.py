"""Feed-forward networks."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.args import Activation
from torchtitan.models.costs import Cost, products_of

GATE_LIMIT = 7.0
GATE_SLOPE = 1.702
"""Constants of `clamped_swiglu`: the clamp's limit and the sigmoid's slope."""


def activate(kind: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """The hidden features of a feed-forward network, like `gate`; `up` is None for `relu2`."""
    if up is None:
        return F.relu(gate).square()
    if kind == "swiglu":
        return F.silu(gate) * up
    if kind == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=GATE_LIMIT)
    up = up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return gate * (GATE_SLOPE * gate).sigmoid() * (up + 1)


class FeedForward(nn.Module):
    """`w2(activation(w1(x), w3(x)))`, on `[b, s, dim]`."""

    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation = "swiglu", bias: bool = False
    ):
        super().__init__()
        self.activation: Activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.w3 = None if activation == "relu2" else nn.Linear(dim, hidden_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        up = None if self.w3 is None else self.w3(x)
        return self.w2(activate(self.activation, gate, up))

    def cost(self, seq_len: int) -> Cost:
        """Its backward needs the input, `w2`'s input, and what that is made of."""
        hidden, dim = self.w1.weight.shape
        return Cost(
            products=products_of(self, ("w1", "w3", "w2")),
            gathered=(dim,),
            moved=(2 if self.w3 is None else 3) * hidden,
            saved=dim + (3 if self.w3 is None else 4) * hidden,
            inner=hidden,
        )
