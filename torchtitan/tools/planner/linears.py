"""A block's linear layers on one rank: their local sizes, which of them round to 8 bits, and which
the backward recomputes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan.config.converters import (
    FLOAT8,
    GROUPED_FLOAT8,
    GROUPED_MX,
    MX,
    SMALL_LAYERS,
    gains_by_float8,
    names_any,
    uses,
)
from torchtitan.config.derive import compiles_blocks, layout_degrees, selects_operations
from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.config.sections.schema import Config
from torchtitan.models.args import DecoderArgs
from torchtitan.tools.planner.block import Kind, Layer, Mixing, block_layers

FLOAT8_MULTIPLE = 16
MX_MULTIPLE = 32
"""An 8-bit linear layer's sizes on each rank must be multiples of this: torch._scaled_mm's
alignment in elements, and the block that shares a scale in the OCP Microscaling Formats
specification 1.0.
"""


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block, as one rank sees it."""

    name: str
    inputs: int
    outputs: int
    eight_bit: bool
    """The operands are rounded to 8 bits."""
    recompute_share: float
    """Share of the blocks whose backward recomputes it."""
    rows: float = 1.0
    """Rows that it multiplies per token."""
    experts: int = 0
    """Number of weights of a grouped product; 0: not a grouped product."""
    fp32: bool = False
    """The layer computes in fp32, whatever the type of the activations."""
    keeps_result: bool = False
    """Checkpointing by operation saves the result."""

    @property
    def flops(self) -> float:
        """FLOPs of the forward per token."""
        return 2.0 * self.inputs * self.outputs * self.rows

    @property
    def params(self) -> int:
        return self.inputs * self.outputs * max(1, self.experts)


@dataclass(frozen=True)
class Recompute:
    """Shares of a block's work that its backward repeats."""

    products: float
    attention: float
    pointwise: float


def block_linears(
    config: Config, args: DecoderArgs, kind: Kind, mixing: Mixing
) -> Iterator[Linear]:
    """A block's linear layers in order; checkpointing by operation keeps every second."""
    degrees = layout_degrees(config.parallelism)
    tp = degrees["tp"]
    ep = degrees["ep"]
    ac = config.activation_checkpoint
    share = recompute_of(ac).products
    by_operation = selects_operations(ac)
    products = 0
    layers = list(block_layers(args, kind, mixing))
    forced_names = ac.per_op_sac_force_recompute_mm_shapes_by_fqns
    forced_shapes = {_shape(x) for x in layers if names_any(forced_names, f"layers.0.{x.name}")}
    for layer in layers:
        name = layer.name
        if name in ("moe.shared.w1", "moe.experts.w1") and (tp > 1 or ep > 1):
            products = 0  # a separate region
        products += 1
        every_second = by_operation and products % 2 == 1 and _shape(layer) not in forced_shapes
        # No gradient needs this result: the compiler drops it.
        dropped = name == "feed_forward.w2" and compiles_blocks(config)
        linear = Linear(
            name,
            layer.inputs,
            layer.outputs,
            eight_bit=False,
            recompute_share=0.0 if every_second or dropped else share,
            keeps_result=every_second and not dropped,
        )
        if layer.split == "experts":
            yield replace(
                linear,
                eight_bit=experts_in_eight_bits(config),
                rows=args.experts_per_token / tp,
                experts=args.n_experts // ep,
            )
        elif layer.split == "tokens":
            yield replace(linear, rows=1 / tp, fp32=name.endswith("gate"))
        else:
            rows = layer.split == "rows"
            yield replace(
                linear,
                eight_bit=in_eight_bits(config, f"layers.0.{name}", layer.inputs, layer.outputs),
                inputs=layer.inputs // tp if rows else layer.inputs,
                outputs=layer.outputs if rows else layer.outputs // tp,
            )


def _shape(layer: Layer) -> tuple[int, int, bool]:
    """Equal for layers whose weights have the same shape."""
    return layer.inputs, layer.outputs, layer.split == "experts"


def recompute_of(ac: ActivationCheckpoint) -> Recompute:
    """The shares of a block that its backward recomputes under this activation checkpointing."""
    if ac.mode == "full":
        return Recompute(1.0, 1.0, 1.0)
    if selects_operations(ac):
        return Recompute(1.0, 0.0, 1.0)  # products that aren't kept, see `block_linears`
    if ac.mode == "selective":
        share = 1 / int(ac.selective_ac_option)
        return Recompute(share, share, share)
    if ac.mode == "memory_budget":
        share = 1 - ac.memory_budget
        return Recompute(share, share, 1.0)
    return Recompute(0.0, 0.0, 0.0)


def in_eight_bits(config: Config, name: str, inputs: int, outputs: int) -> bool:
    """Whether `model.converters` changes the linear layer of this name and size."""
    float8 = uses(config, FLOAT8)
    if not (float8 or uses(config, MX)):
        return False
    linear = config.quantize.linear
    filters = linear.float8.filter_fqns if float8 else linear.mx.filter_fqns
    multiple = FLOAT8_MULTIPLE if float8 else MX_MULTIPLE
    multiple *= config.parallelism.tensor_parallel_degree
    is_excluded = any(pattern in name for pattern in filters if pattern != SMALL_LAYERS)
    if is_excluded or inputs % multiple or outputs % multiple:
        return False
    if not float8 or SMALL_LAYERS not in filters:
        return True
    return gains_by_float8(linear.float8.recipe_name, inputs, outputs)


def experts_in_eight_bits(config: Config) -> bool:
    """Whether grouped products of experts round their operands to 8 bits."""
    grouped = config.quantize.grouped_mm
    experts = "layers.0.moe.experts"
    float8 = uses(config, GROUPED_FLOAT8) and names_any(grouped.float8.fqns, experts)
    return float8 or (uses(config, GROUPED_MX) and names_any(grouped.mx.fqns, experts))
