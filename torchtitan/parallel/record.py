"""What a rank computes, keeps and communicates for a microbatch, without a model or a mesh: the
costs of a model's parts (`torchtitan.models.costs`), as each step of `parallelize` divides them.

Notation: d is the width of the residual stream, E a block's experts, and k a token's, all equally
loaded. Sizes are per token of a microbatch before tensor parallelism unless stated otherwise.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

from torchtitan.config.converters import (
    FLOAT8,
    MX,
    converts_experts,
    converts_linear,
    names_any,
    uses,
)
from torchtitan.config.derive import (
    axis_degrees,
    compiles_blocks,
    gradient_accumulation_steps,
    offloaded_blocks,
    selects_operations,
    sums_on_replicas,
    sums_whole_gradients,
)
from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.config.sections.schema import Config
from torchtitan.models import get_spec
from torchtitan.models.costs import FP32, Cost, Heads, Product
from torchtitan.models.moe.moe import ROUTING_BYTES
from torchtitan.models.spec import ShardingStyle as Style
from torchtitan.parallel.fsdp import manages_no_weight
from torchtitan.parallel.kinds import Stage, kinds_of, stages_of
from torchtitan.parallel.pipeline.split import PipelinePlan

BYTES = {"bfloat16": 2, "float32": FP32}
FP8 = 1
"""Bytes of an element. Gradients add up in fp32."""
TENSOR_LAUNCHES = (6, 8, 6, 8)
EXCHANGE_LAUNCHES = (20, 6, 20, 6)
"""Kernels that tensor parallelism and an exchange of experts' rows add, as `Cost.launches`."""
EXCHANGE_COPIES = 4
"""Times that an exchange reads or writes a row beside its transfer, in the forward."""
_DIVIDED = {
    *(Style.COLUMNS, Style.COLUMNS_OF_SEQUENCE, Style.ROWS, Style.PER_HEAD, Style.WHOLE_NORM),
    *(Style.EMBEDDING, Style.OUTPUT),
}
"""Styles whose weights tensor parallelism divides."""


# ---- products


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block, as one rank sees it."""

    name: str
    inputs: int
    outputs: int
    rows: float
    """Rows that it multiplies per token."""
    eight_bit: bool
    """The operands are rounded to 8 bits."""
    recompute_share: float = 0.0
    """Share of the blocks whose backward recomputes it."""
    keeps_result: bool = False
    """Checkpointing by operation saves the result."""
    experts: int = 0
    """Number of weights of a grouped product; 0: not a grouped product."""
    fp32: bool = False
    """The layer computes in fp32, whatever the type of the activations."""
    shards: int = 1
    """Ranks of tensor parallelism that share its weight."""

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


def recompute_of(ac: ActivationCheckpoint) -> Recompute:
    """The shares of a block that its backward recomputes under this activation checkpointing."""
    if selects_operations(ac):
        return Recompute(1.0, 0.0, 1.0)  # products that aren't kept, see `Record.linears`
    if ac.mode == "memory_budget":
        share = 1 - ac.memory_budget
        return Recompute(share, share, 1.0)
    share = 1 / int(ac.selective_ac_option) if ac.mode == "selective" else float(ac.mode == "full")
    return Recompute(share, share, share)


class Unit(NamedTuple):
    """Weights that FSDP gathers together."""

    params: float
    """Elements, with padding, before FSDP."""
    ranks: int
    """Ranks that share them."""
    stride: int
    """Ranks from one of these to the next."""
    gathered_bytes: int
    """Bytes of a gathered element."""


# ---- the record

_OF_BLOCKS = ("linears", "expert_params", "block_params")
"""Properties that depend on a block, tensor and expert parallelism, and checkpointing alone."""


class Record:
    """One training step of a configuration on each rank.

    Properties of a block are the most common kind's. `blocks` has a record for each kind, as if all
    blocks were of that kind.
    """

    cost: Cost
    """Of a block."""

    def __init__(
        self, config: Config, args: Any, pipeline: PipelinePlan | None, *, like: Self | None = None
    ):
        """
        Args:
            config: derived and validated.
            args: the model's arguments.
            pipeline: None without one.
            like: a record of the same model, row length, tensor- and expert-parallel degrees, and
                checkpointing, whose blocks are shared: a search makes thousands.

        Raises:
            UserError: a part of the model declares no cost.
        """
        t = config.training
        p = config.parallelism
        self.config = config
        self.args = args
        self.pipeline = pipeline
        self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp = axis_degrees(p).values()
        self.fsdp = self.dp_shard * self.cp
        self.world = self.pp * self.dp_replicate * self.fsdp * self.tp
        self.ep = p.expert_parallel_degree
        self.dim = args.dim
        self.vocab = args.vocab_size
        self.seq_len = t.seq_len
        rows = pipeline.microbatch_size if pipeline else t.local_batch_size
        self.microbatches = t.local_batch_size // rows
        self.accumulation = gradient_accumulation_steps(config)
        self.tokens = rows * t.seq_len // self.cp
        self.compiled = compiles_blocks(config)
        self.loss_compiled = config.compile.enable and "loss" in config.compile.components
        self.float8 = uses(config, FLOAT8)
        self.mx = uses(config, MX)
        self.recompute = recompute_of(config.activation_checkpoint)
        spec = get_spec(config.model.name)
        self._tied = bool(spec.tied_modules(args))
        self.predictions = 1 + spec.mtp_modules(args)
        """Tokens that each token's hidden states predict."""
        self.kinds, self._kind_of_block = kinds_of(config.model.name, args, t.seq_len)
        self._shards: dict[Stage, float] = {}
        common = Counter(self._kind_of_block).most_common(1)[0][0]
        self.kind = self.kinds[common]
        self.blocks: list[Self] = [copy(self) for _ in self.kinds]
        """A record for each kind of block."""
        for block, kind in zip(self.blocks, self.kinds, strict=True):
            block.kind = kind
        for record in (self, *self.blocks):
            record.cost = self.adapted(record.kind.cost)
        if like is not None:
            for mine, other in zip([self, *self.blocks], [like, *like.blocks], strict=True):
                for name in _OF_BLOCKS:
                    setattr(mine, name, getattr(other, name))
        self.vocab_params = self.vocab * self.dim // self.tp
        """Parameters of the embedding, or the output projection, on one tensor-parallel rank."""
        self.stages = stages_of(pipeline, self._kind_of_block, len(self.kinds))
        """In the order of the model."""
        self._of_rank = [
            tuple(stage for stage in self.stages if stage.rank == rank) for rank in range(self.pp)
        ]

    def adapted(self, cost: Cost) -> Cost:
        """The cost of a block as this software has it."""
        return cost

    # ---- of a kind of block: the products

    @property
    def heads(self) -> Heads:
        """The mixing of tokens."""
        assert self.cost.heads is not None, "a block mixes tokens"
        return self.cost.heads

    @cached_property
    def experts(self) -> int:
        """Experts of a block."""
        return max((x.experts for x in self.cost.products), default=0)

    @cached_property
    def expert_rows(self) -> float:
        """Rows per token that a rank sends to experts and, with equal loads, receives."""
        return max((x.rows for x in self.cost.products if x.experts), default=0) / self.tp

    @cached_property
    def linears(self) -> list[Linear]:
        """A block's linear layers in order; checkpointing by operation keeps every second."""
        by_operation = selects_operations(self.config.activation_checkpoint)
        share = self.recompute.products
        count = 0
        out = []
        for product, style in zip(self.cost.products, self.kind.styles, strict=True):
            if product.name in ("moe.shared.w1", "moe.experts.w1") and self.experts_apart:
                count = 0  # a separate region
            count += 1
            # No gradient needs this result: the compiler drops it.
            is_dropped = product.name == "feed_forward.w2" and self.compiled
            is_kept = by_operation and count % 2 == 1 and _shape(product) not in self.forced_shapes
            out.append(
                self._divided(
                    product,
                    style,
                    recompute_share=0.0 if is_kept or is_dropped else share,
                    keeps_result=is_kept and not is_dropped,
                )
            )
        return out

    @cached_property
    def forced_shapes(self) -> set[tuple[int, int, bool]]:
        """Shapes of the weights whose products checkpointing by operation always recomputes."""
        names = self.config.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
        return {
            _shape(x)
            for layer, kind in enumerate(self._kind_of_block)
            for x in self.kinds[kind].cost.products
            if names_any(names, f"layers.{layer}.{x.name}")
        }

    def _divided(self, x: Product, style: Style, **checkpointing: Any) -> Linear:
        """One rank's part of a product."""
        name = f"layers.0.{x.name}"
        columns = self.tp if style in (Style.COLUMNS, Style.COLUMNS_OF_SEQUENCE) else 1
        rows = self.tp if style is Style.ROWS else 1
        is_whole = columns * rows == 1 and style is not Style.OUTPUT and self.tp > 1
        if x.experts:
            eight_bit = converts_experts(self.config, name.rpartition(".")[0])
        else:
            eight_bit = style not in (Style.GATE, Style.NORM) and converts_linear(
                self.config, name, x.inputs, x.outputs
            )
        return Linear(
            x.name,
            x.inputs // rows,
            x.outputs // columns,
            x.rows / self.tp if is_whole else x.rows,
            eight_bit,
            experts=x.experts // self.ep,
            fp32=x.fp32,
            shards=columns * rows,
            **checkpointing,
        )

    @cached_property
    def output(self) -> Linear:
        """The projection to the vocabulary."""
        eight_bit = converts_linear(self.config, "output", self.dim, self.vocab)
        return Linear("output", self.dim, self.vocab // self.tp, 1.0, eight_bit)

    @cached_property
    def launches(self) -> tuple[float, ...]:
        """As `Cost.launches`."""
        parts = [self.cost.launches]
        parts += [EXCHANGE_LAUNCHES] if self.experts and self.ep > 1 else []
        parts += [TENSOR_LAUNCHES] if self.tp > 1 else []
        return tuple(map(sum, zip(*parts, strict=True)))

    @property
    def attention_flops(self) -> float:
        """FLOPs of one block's mixing of tokens in its forward."""
        return self.heads.flops / self.tp

    @property
    def moved_bytes(self) -> float:
        """Bytes that a compiled block's pointwise kernels read and write in its forward."""
        exchange = EXCHANGE_COPIES * self.expert_rows * self.dim if self.ep > 1 else 0.0
        return (self.element * self.cost.moved + self.cost.moved_bytes) / self.tp + (
            self.element * exchange
        )

    # ---- of a kind of block: weights

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one block's experts' matrices on one expert-parallel rank."""
        return sum(x.params for x in self.linears if x.experts)

    @cached_property
    def block_params(self) -> int:
        """Parameters of one block on one tensor- and expert-parallel rank."""
        divisors = dict.fromkeys(_DIVIDED, self.tp) | {Style.EXPERTS: self.ep}
        return sum(size // divisors.get(style, 1) for style, size in self.kind.weights)

    @cached_property
    def efsdp(self) -> int:
        """Ranks over which FSDP shards an expert."""
        return self.fsdp * self.tp // self.ep

    @cached_property
    def experts_apart(self) -> bool:
        """Whether FSDP gathers a block's experts separately."""
        return self.experts > 0 and (self.tp > 1 or self.ep > 1)

    @cached_property
    def expert_padding(self) -> float:
        """Elements that FSDP gathers and reduces for the experts, relative to their parameters.

        Whole matrices are padded where the ranks don't divide their number.
        """
        if not self.experts:
            return 1.0
        divides = self.dim % self.efsdp == 0 and self.cost.inner % self.efsdp == 0
        if self.experts_apart and divides:  # splits each matrix instead
            return 1.0
        local_experts = max(1, self.experts // self.ep)
        return math.ceil(local_experts / self.efsdp) * self.efsdp / local_experts

    @property
    def units(self) -> list[Unit]:
        """The block's weights as FSDP gathers them."""
        experts = self.expert_params * self.expert_padding
        dense = self.block_params - self.expert_params
        if not self.experts_apart:
            return [Unit(dense + experts, self.fsdp, self.tp, self.gathered_bytes)]
        return [
            Unit(dense, self.fsdp, self.tp, self.gathered_bytes),
            Unit(experts, self.efsdp, self.ep, self.element),
        ]

    # ---- of a kind of block: communication

    @property
    def tensor_widths(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """All-gathers and reduce-scatters of tensor parallelism in a microbatch's forward and
        backward: the widths of their tensors, with the number of each.

        With sequence parallelism each pass has two of each (Korthikanti et al., arXiv:2205.05198):
        what is gathered in the forward is scattered in the backward. The backward gathers inputs
        again, whether it recomputes them or kept their shards; recomputing all of a block also
        scatters its results again, and a compiler drops the last of those, which nothing reads.
        Routed experts get the tokens of each rank.
        """
        inputs = self.cost.gathered
        results = self.tensor_results
        drops = 1 if self.compiled and not self.experts else 0
        again = (results - drops) * self.recompute.attention
        gathers = [(width, 2.0) for width in inputs] + [(self.dim, float(results))]
        scatters = [(width, 1.0) for width in inputs] + [(self.dim, results + again)]
        return gathers, scatters

    @property
    def tensor_results(self) -> int:
        """Results that tensor parallelism scatters in a forward."""
        return self.kind.styles.count(Style.ROWS)

    @property
    def by_heads(self) -> bool:
        """Whether context parallelism gives each rank whole rows of some heads."""
        ulysses = self.config.parallelism.context_parallel_method == "ulysses"
        return self.cp > 1 and (ulysses or not self.heads.kv_heads)

    @property
    def heads_exchanged(self) -> tuple[float, float]:
        """Bytes that a block exchanges in the forward of one microbatch if context parallelism
        gives each rank whole rows of some heads: the heads' input, on the way to their ranks, and
        their output on its way back.
        """
        size = self.element * self.tokens / self.tp
        heads = self.heads
        copies = max(1, self.cp * self.tp // heads.kv_heads) if heads.kv_heads else 1
        heads_read = heads.queries + copies * (heads.keys + heads.values) + heads.gates
        return size * heads_read, size * heads.out

    @property
    def exchanges(self) -> float:
        """Times that the forward of a block's experts exchanges rows, recomputation included.

        Selection by operation saves what is exchanged, and a compiler's budget doesn't reach it.
        """
        if self.config.activation_checkpoint.mode in ("full", "selective"):
            return 1 + self.recompute.attention
        return 1

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of the rows that a rank sends to the experts, or gets back, for one microbatch."""
        return self.element * self.tokens * self.expert_rows * self.dim

    # ---- of a kind of block: memory

    @cached_property
    def block_bytes(self) -> float:
        """Bytes that a block's backward needs."""
        cost = self.cost
        elements = cost.saved + (0.0 if self.compiled else cost.saved_eager)
        if any(x.experts and x.eight_bit for x in self.linears):
            elements += cost.saved_in_8_bits
        return (self.element * elements + cost.saved_bytes) / self.tp

    @cached_property
    def saved_bytes(self) -> float:
        """Bytes that a block keeps from its forward to its backward."""
        boundary = self.element * self.dim / self.tp
        if selects_operations(self.config.activation_checkpoint):
            return boundary + self._selected_bytes
        share = self.recompute.products
        return share * boundary + (1 - share) * self.block_bytes

    @property
    def _selected_bytes(self) -> float:
        """Bytes that checkpointing by operation keeps: every second product, attention, and results
        summed over ranks. Between the regions of experts that are apart also what goes from one to
        the next.
        """
        total = sum(
            (FP32 if x.fp32 else self.element) * x.rows * x.outputs
            for x in self.linears
            if x.keeps_result
        )
        total += (self.element * self.heads.out + FP32 * self.heads.log_sums) / self.tp
        if self.tp > 1:
            total += self.element * (1 if self.experts else 2) * self.dim / self.tp
        if self.experts_apart:
            exchanges = 2 if self.ep > 1 else 1  # before the exchange, and after it
            total += self.element * self.dim * (1 / self.tp + exchanges * self.expert_rows)
            total += FP32 * self.experts / self.tp + ROUTING_BYTES * self.expert_rows
        return total

    @property
    def offloaded_per_block(self) -> float:
        """Bytes of one microbatch that an offloaded block keeps in host memory."""
        # torch keeps results of operations out of the hooks' sight.
        hooks_see_all = self.compiled or not selects_operations(self.config.activation_checkpoint)
        kept = self.saved_bytes if hooks_see_all else self.element * self.dim / self.tp
        return self.tokens * kept

    @cached_property
    def postponed_bytes(self) -> float:
        """Bytes that a block keeps between its backwards of inputs and of weights, and not
        otherwise: gradients of the results of its parameters. A compiled block is one operation,
        whose result is its output.
        """
        if self.compiled:
            return self.element * self.dim / self.tp
        norms = 2 * self.dim / self.tp
        return self.element * (norms + sum(x.rows * x.outputs for x in self.linears))

    # ---- of the model

    def block_counts(self, stages: Iterable[Stage]) -> list[tuple[Self, int]]:
        """The kinds of blocks on these stages, with how many there are of each."""
        counts = [sum(column) for column in zip(*(stage.kinds for stage in stages), strict=True)]
        pairs = zip(self.blocks, counts, strict=True)
        return [(block, count) for block, count in pairs if count]

    def offloaded(self, stage: Sequence[Stage]) -> tuple[int, float]:
        """Number of offloaded blocks of stages, and the bytes of one of average size."""
        blocks = self.block_counts(stage)
        layers = sum(count for _, count in blocks)
        if not layers:
            return 0, 0.0
        mean = sum(count * block.offloaded_per_block for block, count in blocks) / layers
        return offloaded_blocks(self.config.activation_checkpoint, layers), mean

    @property
    def async_tp(self) -> bool:
        return self.tp > 1 and self.config.parallelism.enable_async_tensor_parallel

    @property
    def sharded_loss(self) -> bool:
        return self.tp > 1 and not self.config.parallelism.disable_loss_parallel

    @cached_property
    def sums_whole_gradients(self) -> bool:
        """Whether batches add up in whole gradients, reduced after the last one."""
        accumulates = self.accumulation > 1 and self.pipeline is None
        return accumulates and sums_whole_gradients(self.config)

    @cached_property
    def replicas_apart(self) -> bool:
        """Whether batches add up on each replica, all-reduced after the last one."""
        return self.pipeline is None and sums_on_replicas(self.config)

    @cached_property
    def stays_whole(self) -> bool:
        """Whether FSDP manages no weight."""
        return manages_no_weight(
            self.config,
            self.fsdp * self.dp_replicate,
            converts_weights=self.tp > 1 or self.gathered_bytes != self.element,
        )

    @property
    def regathers(self) -> bool:
        """Whether FSDP frees blocks after their forward, and gathers them again."""
        never = self.config.parallelism.fsdp_reshard_after_forward == "never"
        return self.pipeline is None and not never

    @property
    def copied_bytes(self) -> int:
        """Bytes of a weight's copy, where copies stand in for weights that FSDP doesn't manage."""
        return self.element if self.stays_whole and self.element != self.stored_bytes else 0

    @cached_property
    def element(self) -> int:
        """Bytes of a gathered parameter or an activation."""
        return BYTES[self.config.training.mixed_precision_param]

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of a sharded parameter."""
        return BYTES[self.config.training.dtype]

    @cached_property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient in a reduction."""
        return BYTES[self.config.training.mixed_precision_reduce]

    @cached_property
    def tensorwise(self) -> bool:
        """Whether linear layers compute in Float8 with one scale per tensor."""
        recipe = self.config.quantize.linear.float8.recipe_name or "tensorwise"
        return self.float8 and recipe == "tensorwise"

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of a block's parameter in FSDP's all-gather."""
        in_float8 = self.config.quantize.linear.float8.enable_fsdp_float8_all_gather
        return FP8 if self.float8 and in_float8 else self.element

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.config.training.global_batch_size * self.seq_len

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a microbatch's hidden states between stages, split by tensor parallelism; and of
        the embeddings that travel with them where further tokens are predicted.
        """
        return self.element * self.tokens * self.predictions * self.dim / self.tp

    def params(self, stage: Stage) -> int:
        """Parameters of a stage on one tensor- and expert-parallel rank, before FSDP."""
        blocks = sum(count * block.block_params for block, count in self.block_counts([stage]))
        return blocks + sum(self.ends(stage))

    def ends(self, stage: Stage) -> list[int]:
        """Parameters of FSDP's units besides blocks: the token embeddings; and the last norm with
        the output projection. Tied, they are one unit.
        """
        if stage.has_embedding and self._tied:
            return [self.vocab_params + self.dim]
        first = [self.vocab_params] * stage.has_embedding
        return first + [self.vocab_params + self.dim] * stage.has_output

    def shard(self, stage: Stage) -> float:
        """Parameters of a stage on one rank."""
        if stage not in self._shards:
            counts = self.block_counts([stage])
            dense_params = self.params(stage) - sum(n * block.expert_params for block, n in counts)
            expert_params = sum(
                n * block.expert_params * block.expert_padding for block, n in counts
            )
            self._shards[stage] = dense_params / self.fsdp + expert_params / self.efsdp
        return self._shards[stage]

    def stages_of(self, pp_rank: int) -> Sequence[Stage]:
        return self._of_rank[pp_rank]

    @cached_property
    def unlike_ranks(self) -> tuple[int, ...]:
        """The first and the last of the pipeline ranks whose stages are equal: ranks in between
        need memory in between.
        """
        last = {stages: rank for rank, stages in enumerate(self._of_rank)}
        return tuple(sorted({*last.values(), *map(self._of_rank.index, last)}))


def _shape(product: Product) -> tuple[int, int, bool]:
    """Equal for layers whose weights have the same shape."""
    return product.inputs, product.outputs, product.experts > 0
