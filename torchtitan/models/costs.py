"""What each part of a model costs. A part declares it beside its forward, as `cost(seq_len)`.

Costs are per token of the whole model, beside the weights. Tensor parallelism divides all of them:
a rank has some of the features, or some of the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from torch import Tensor, nn

from torchtitan.utils.errors import UserError

FP32 = 4
"""Bytes of an element."""


@dataclass(frozen=True)
class Product:
    """A product of activations with a weight `[outputs, inputs]`."""

    name: str
    inputs: int
    outputs: int
    rows: float = 1.0
    """Rows per token."""
    experts: int = 0
    """Weights of a grouped product; 0: not a grouped product."""
    fp32: bool = False
    """It computes in fp32, whatever the type of the activations; its forward on a CPU only."""


@dataclass(frozen=True)
class Heads:
    """The mixing of tokens by heads: their widths, and FLOPs."""

    queries: int
    keys: int
    values: int
    """Widths of all queries, keys and values."""
    out: int
    """Width of the output projection's input."""
    flops: float
    """FLOPs of the forward."""
    backward: float
    """FLOPs of the backward per FLOP of the forward."""
    kv_heads: int = 0
    """Heads of keys and values; 0: a linear recurrence in fp32, which needs whole rows."""
    log_sums: int = 0
    """Numbers in fp32 that attention's backward needs, besides its inputs and its output."""
    window: bool = False
    """Tokens don't see all earlier ones."""
    gates: int = 0
    """Numbers besides queries, keys and values that heads read."""


@dataclass(frozen=True)
class Cost:
    """A part's cost, per token. Elements have the type of activations."""

    products: tuple[Product, ...] = ()
    """In the order in which they run."""
    gathered: tuple[int, ...] = ()
    """Widths of the inputs that tensor parallelism gathers along the sequence."""
    moved: float = 0.0
    """Elements that the pointwise kernels of a compiled forward read and write. Counted."""
    moved_bytes: float = 0.0
    """Bytes likewise, of fp32 and integers."""
    saved: float = 0.0
    """Elements that the backward needs."""
    saved_bytes: float = 0.0
    """Bytes likewise, of fp32 and integers."""
    saved_eager: float = 0.0
    """Elements that the backward needs besides, if the part isn't compiled."""
    saved_in_8_bits: float = 0.0
    """Elements that the backward needs besides, if grouped products round their operands."""
    launches: tuple[float, float, float, float] = (0, 0, 0, 0)
    """Kernels of an eager forward and backward, and of compiled ones. Eager: counted in traced
    steps. Compiled: tests/cuda/compiled-kernels.md.
    """
    inner: int = 0
    """Inner width of the feed-forward network or of an expert."""
    heads: Heads | None = None

    def __add__(self, other: "Cost") -> "Cost":
        """Both, one after the other."""
        return Cost(
            products=self.products + other.products,
            gathered=self.gathered + other.gathered,
            moved=self.moved + other.moved,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            saved=self.saved + other.saved,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            saved_eager=self.saved_eager + other.saved_eager,
            saved_in_8_bits=self.saved_in_8_bits + other.saved_in_8_bits,
            launches=tuple(map(add, self.launches, other.launches)),
            inner=other.inner or self.inner,
            heads=self.heads or other.heads,
        )


def products_of(module: nn.Module, names: Sequence[str], rows: float = 1.0) -> tuple[Product, ...]:
    """The products of a module's linear layers or stacks of weights that it has, in order."""
    products = []
    for name in names:
        layer: Any = getattr(module, name, None)
        if layer is not None:
            weight = getattr(layer, "weight", layer)
            if not isinstance(weight, Tensor):  # more than a layer
                raise _no_cost(type(module))
            outputs, inputs = weight.shape[-2:]
            experts = len(weight) if weight.dim() == 3 else 0
            fp32 = getattr(layer, "fp32", False)
            products.append(Product(name, inputs, outputs, rows, experts=experts, fp32=fp32))
    return tuple(products)


def _no_cost(cls: type) -> UserError:
    return UserError(
        f"{cls.__module__}.{cls.__name__} declares no cost, so a plan would be wrong: add a "
        "method cost(seq_len) that returns a torchtitan.models.costs.Cost, with all its "
        "products, and heads if it mixes tokens"
    )


def cost_of(module: nn.Module, seq_len: int, name: str = "") -> Cost:
    """The cost of a part, its products named from the part called `name` on.

    Raises:
        UserError: the class that replaced its forward doesn't declare its cost.
    """
    for cls in type(module).__mro__:
        if "cost" in vars(cls):
            break
        if "forward" in vars(cls):
            raise _no_cost(cls)
    cost: Any = module.cost(seq_len)
    if not isinstance(cost, Cost):
        raise _no_cost(type(module))
    prefix = f"{name}." if name else ""
    products = tuple(replace(x, name=prefix + x.name) for x in cost.products)
    return replace(cost, products=products)
