"""A configuration reduced to the quantities that the planner's formulas take.

Notation of `costs.py` and `memory.py`: d is the width of the residual stream, q and kv the widths
of all query heads and of all key (or value) heads, f the inner width of the feed-forward network or
of an expert, V the vocabulary, S the sequence length, T the tokens of one microbatch on one rank
before tensor parallelism, E a block's experts, and k a token's, all equally loaded.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torchtitan.config.derive import (
    axis_degrees,
    gradient_accumulation_steps,
    sums_on_replicas,
    sums_whole_gradients,
)
from torchtitan.config.features import (
    FLOAT8,
    GROUPED_FLOAT8,
    GROUPED_MX,
    MX,
    SMALL_LAYERS,
    compiles_blocks,
    gains_by_float8,
    names_any,
    uses,
)
from torchtitan.config.sections.schema import Config
from torchtitan.models.protocols import TransformerArgs
from torchtitan.parallel.pipeline_stages import StagePlan
from torchtitan.utils.errors import UserError

BYTES = {"bfloat16": 2, "float32": 4}
FP32 = 4
FP8 = 1
"""Bytes of an element. Gradients add up in fp32."""

BACKWARD_PRODUCTS = 2
"""Matrix products in the backward per product in the forward: the gradients of its input and of its
weight.
"""
BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward per FLOP of its forward: 5 products, with the scores recomputed,
for 2 (Dao, arXiv:2307.08691, section 4.1).
"""
FLOAT8_MULTIPLE = 16
MX_MULTIPLE = 32
"""An 8-bit linear layer's sizes on each rank must be multiples of this: torch._scaled_mm's
alignment in elements, and the block that shares a scale in the OCP Microscaling Formats
specification 1.0.
"""

_SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim")


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block, as one rank sees it."""

    name: str
    inputs: int
    outputs: int
    eight_bit: bool
    """Its operands are rounded to 8 bits."""
    recomputed: float
    """Share of the blocks whose backward recomputes it."""
    rows: float = 1.0
    """Rows that it multiplies per token."""
    experts: int = 0
    """Weights of a grouped product; 0: it is none."""
    fp32: bool = False
    """Computes in fp32, whatever the type of the activations."""

    @property
    def flops(self) -> float:
        """FLOPs of the forward per token."""
        return 2.0 * self.inputs * self.outputs * self.rows

    @property
    def params(self) -> int:
        return self.inputs * self.outputs * max(1, self.experts)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage; without a pipeline, the whole model."""

    rank: int
    """Place along the `pp` axis."""
    layers: int
    has_embedding: bool
    has_output: bool
    """Holds the final norm and the output projection, and computes the loss."""


@dataclass(frozen=True)
class Recompute:
    """Shares of a block's work that its backward repeats."""

    products: float
    attention: float
    pointwise: float


def _check_covered(config: Config, args: TransformerArgs) -> None:
    """
    Raises:
        UserError: the formulas don't cover this model.
    """
    if missing := [name for name in _SIZES if not hasattr(args, name)]:
        raise UserError(
            f"model.name: the planner's closed forms need a model with {', '.join(_SIZES)}; "
            f"{config.model.name} has no {', '.join(missing)}"
        )
    if getattr(args, "n_experts", 0) and args.n_dense_layers:
        key = "model.overrides.n_dense_layers"
        raise UserError(
            f"{key}: the planner's closed forms need blocks that are alike; plan with 0"
        )
    if getattr(args, "n_mtp", 0):
        raise UserError(
            "model.overrides.n_mtp: the planner's closed forms don't cover modules that predict "
            "further tokens; plan with 0"
        )


class Workload:
    """One training step of `config` on each rank."""

    def __init__(
        self,
        config: Config,
        args: TransformerArgs,
        stages: StagePlan | None,
        *,
        kv_repeated: bool = False,
    ):
        """
        Args:
            config: derived and validated.
            args: the model's arguments.
            stages: the pipeline; None without one.
            kv_repeated: keys and values are copied for every query head before attention, as
            TorchTitan did when its tables were measured. This project's attention doesn't.

        Raises:
            UserError: the formulas don't cover this model family.
        """
        _check_covered(config, args)
        t = config.training
        p = config.parallelism
        self.config = config
        self.args = args
        self.experts = getattr(args, "n_experts", 0)
        self.top_k = getattr(args, "experts_per_token", 0)
        self.pipeline = stages
        degrees = axis_degrees(p)
        self.pp = degrees["pp"]
        self.dp_replicate = degrees["dp_replicate"]
        self.dp_shard = degrees["dp_shard"]
        self.cp = degrees["cp"]
        self.tp = degrees["tp"]
        self.fsdp = self.dp_shard * self.cp
        self.world = self.pp * self.dp_replicate * self.fsdp * self.tp
        self.ep = p.expert_parallel_degree
        self.dim = args.dim
        self.vocab = args.vocab_size
        self.seq_len = t.seq_len
        self.ffn = args.expert_dim if self.experts else args.ffn_dim
        self.q = args.n_heads * args.head_dim
        self.kv = args.n_kv_heads * args.head_dim
        self.kv_attended = self.q if kv_repeated else self.kv
        """Width of the keys (or values) that attention reads and context parallelism sends."""
        rows = stages.microbatch_size if stages else t.local_batch_size
        self.microbatches = t.local_batch_size // rows
        self.accumulation = gradient_accumulation_steps(config)
        self.tokens = rows * t.seq_len // self.cp
        self.compiled = compiles_blocks(config)
        self.loss_compiled = config.compile.enable and "loss" in config.compile.components
        self.float8 = uses(config, FLOAT8)
        self.mx = uses(config, MX)
        self.recompute = self._recompute()
        self.linears = list(self._linears())
        rounded = self._eight_bit("output", self.dim, self.vocab)
        self.output = Linear("output", self.dim, self.vocab // self.tp, rounded, 0.0)
        self.vocab_params = self.vocab * self.dim // self.tp
        """Parameters of the embedding, or the output projection, on one tensor-parallel rank."""
        self.stages = list(self._stages())

    @cached_property
    def efsdp(self) -> int:
        """Ranks over which FSDP shards an expert."""
        return self.fsdp * self.tp // self.ep

    @cached_property
    def experts_apart(self) -> bool:
        """Whether FSDP gathers a block's experts separately."""
        return self.experts > 0 and (self.tp > 1 or self.ep > 1)

    @cached_property
    def eight_bit_experts(self) -> bool:
        """Whether grouped products round their operands to 8 bits."""
        grouped = self.config.quantize.grouped_mm
        experts = "layers.0.moe.experts"
        float8 = uses(self.config, GROUPED_FLOAT8) and names_any(grouped.float8.fqns, experts)
        mx = uses(self.config, GROUPED_MX) and names_any(grouped.mx.fqns, experts)
        return self.experts > 0 and (float8 or mx)

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
    def expert_params(self) -> int:
        """Parameters of one block's experts on one expert-parallel rank."""
        return sum(x.params for x in self.linears if x.experts)

    @cached_property
    def block_params(self) -> int:
        """Parameters of one block on one tensor- and expert-parallel rank."""
        return sum(x.params for x in self.linears) + self._vector_params()

    @cached_property
    def element(self) -> int:
        """Bytes of a gathered parameter or an activation."""
        return BYTES[self.config.training.mixed_precision_param]

    @cached_property
    def stored(self) -> int:
        """Bytes of a sharded parameter."""
        return BYTES[self.config.training.dtype]

    @cached_property
    def reduced(self) -> int:
        """Bytes of a gradient in a reduction."""
        return BYTES[self.config.training.mixed_precision_reduce]

    @cached_property
    def tensorwise(self) -> bool:
        """Whether linear layers compute in Float8 with one scale per tensor."""
        recipe = self.config.quantize.linear.float8.recipe_name or "tensorwise"
        return self.float8 and recipe == "tensorwise"

    @cached_property
    def gathered(self) -> int:
        """Bytes of a block's parameter in FSDP's all-gather."""
        in_float8 = self.config.quantize.linear.float8.enable_fsdp_float8_all_gather
        return FP8 if self.float8 and in_float8 else self.element

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.config.training.global_batch_size * self.seq_len

    @property
    def by_heads(self) -> bool:
        """Whether context parallelism gives each rank whole rows of some heads."""
        return self.cp > 1 and self.config.parallelism.context_parallel_method == "ulysses"

    @property
    def attention_flops(self) -> float:
        """FLOPs of one block's causal attention forward, per token: the unmasked half of 4 S q."""
        return 2.0 * self.seq_len * self.q / self.tp

    def params(self, stage: Stage) -> int:
        """Parameters of a stage on one tensor- and expert-parallel rank, before FSDP."""
        tied = stage.has_embedding and getattr(self.args, "tie_embeddings", False)
        ends = stage.has_embedding + (stage.has_output and not tied)
        blocks = stage.layers * self.block_params
        return blocks + ends * self.vocab_params + stage.has_output * self.dim

    def shard(self, stage: Stage) -> float:
        """Parameters of a stage on one rank."""
        experts = stage.layers * self.expert_params
        others = self.params(stage) - experts
        return others / self.fsdp + experts * self.expert_padding / self.efsdp

    @property
    def expert_rows(self) -> float:
        """Rows per token that a rank sends to experts and, with equal loads, receives."""
        return self.top_k / self.tp

    def stages_of(self, pp_rank: int) -> list[Stage]:
        return [stage for stage in self.stages if stage.rank == pp_rank]

    def checkpoints_operations(self) -> bool:
        """Whether selective activation checkpointing chooses by operation, not by block."""
        ac = self.config.activation_checkpoint
        return ac.mode == "selective" and ac.selective_ac_option == "op"

    def _recompute(self) -> Recompute:
        ac = self.config.activation_checkpoint
        if ac.mode == "full":
            return Recompute(1.0, 1.0, 1.0)
        if self.checkpoints_operations():
            return Recompute(1.0, 0.0, 1.0)  # products: those that aren't kept, see `_linears`
        if ac.mode == "selective":
            share = 1 / int(ac.selective_ac_option)
            return Recompute(share, share, share)
        if ac.mode == "memory_budget":
            share = 1 - ac.memory_budget
            return Recompute(share, share, 1.0)
        return Recompute(0.0, 0.0, 0.0)

    def _linears(self) -> Iterator[Linear]:
        """A block's linear layers in order; checkpointing by operation keeps every second."""
        d = self.dim
        f = self.ffn
        tp = self.tp
        network = "moe.experts" if self.experts else "feed_forward"
        sizes = {
            "attention.wq": (d, self.q),
            "attention.wk": (d, self.kv),
            "attention.wv": (d, self.kv),
            "attention.wo": (self.q, d),
            **({"moe.router.gate": (d, self.experts)} if self.experts else {}),
            f"{network}.w1": (d, f),
            f"{network}.w3": (d, f),
            f"{network}.w2": (f, d),
        }
        forced = self.config.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
        counted = 0
        for name, (inputs, outputs) in sizes.items():
            of_experts = name.startswith("moe.experts")
            of_router = name == "moe.router.gate"
            if name == "moe.experts.w1" and self.experts_apart:
                counted = 0  # a region of its own
            may_be_kept = of_experts or of_router or not any(part in name for part in forced)
            counted += may_be_kept
            kept = self.checkpoints_operations() and may_be_kept and counted % 2 == 1
            unused = name == "feed_forward.w2" and self.compiled  # by gradients: it is dropped
            recomputed = 0.0 if kept or unused else self.recompute.products
            if of_experts:
                yield Linear(
                    name,
                    inputs,
                    outputs,
                    self.eight_bit_experts,
                    recomputed,
                    self.expert_rows,
                    self.experts // self.ep,
                )
            elif of_router:
                yield Linear(name, inputs, outputs, False, recomputed, 1 / tp, fp32=True)
            else:
                rounded = self._eight_bit(f"layers.0.{name}", inputs, outputs)
                if name.endswith(("wo", "w2")):
                    yield Linear(name, inputs // tp, outputs, rounded, recomputed)
                else:
                    yield Linear(name, inputs, outputs // tp, rounded, recomputed)

    @cached_property
    def expert_padding(self) -> float:
        """What FSDP gathers and reduces of experts, relative to their parameters.

        Whole matrices are padded where the ranks don't divide their number.
        """
        if not self.experts:
            return 1.0
        divides = self.dim % self.efsdp == 0 and self.ffn % self.efsdp == 0
        if self.experts_apart and divides:  # splits each matrix instead
            return 1.0
        own = max(1, self.experts // self.ep)
        return math.ceil(own / self.efsdp) * self.efsdp / own

    def _vector_params(self) -> int:
        """Norms, of heads too, and biases of a block."""
        heads = 2 * self.args.head_dim if getattr(self.args, "qk_norm", False) else 0
        biases = (self.q + 2 * self.kv) // self.tp if getattr(self.args, "qkv_bias", False) else 0
        return 2 * self.dim + heads + biases

    def _eight_bit(
        self,
        name: str,
        inputs: int,
        outputs: int,
    ) -> bool:
        """Whether `model.converters` changes the linear layer of this name and size."""
        if not (self.float8 or self.mx):
            return False
        linear = self.config.quantize.linear
        filters = linear.float8.filter_fqns if self.float8 else linear.mx.filter_fqns
        multiple = (FLOAT8_MULTIPLE if self.float8 else MX_MULTIPLE) * self.tp
        excluded = any(part in name for part in filters if part != SMALL_LAYERS)
        if excluded or inputs % multiple or outputs % multiple:
            return False
        if not self.float8 or SMALL_LAYERS not in filters:
            return True
        return gains_by_float8(linear.float8.recipe_name, inputs, outputs)

    def _stages(self) -> Iterator[Stage]:
        if self.pipeline is None:
            yield Stage(0, self.args.n_layers, True, True)
            return
        for rank, names in zip(self.pipeline.ranks, self.pipeline.modules, strict=True):
            layers = sum(name.startswith("layers.") for name in names)
            yield Stage(rank, layers, "tok_embeddings" in names, "output" in names)
