"""A configuration reduced to the quantities that the planner's formulas take.

Notation of `costs.py` and `memory.py`: d is the width of the residual stream, q and kv the widths
of all query heads and of all key (or value) heads, f the inner width of the feed-forward network or
of an expert, V the vocabulary, S the sequence length, T the tokens of one microbatch on one rank
before tensor parallelism splits them, E the experts of a block, and k those of a token. All experts
are assumed to get equally many tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.config.derive import (
    AXES,
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
            TorchTitan did when its
                tables were measured. This project's attention doesn't copy them.

        Raises:
            UserError: the formulas don't cover this model family.
        """
        if missing := [name for name in _SIZES if not hasattr(args, name)]:
            raise UserError(
                f"model.name: the planner's closed forms need a model with {', '.join(_SIZES)}; "
                f"{config.model.name} has no {', '.join(missing)}"
            )
        self.experts = getattr(args, "n_experts", 0)
        self.top_k = getattr(args, "experts_per_token", 0)
        if self.experts and args.n_dense_layers:
            raise UserError(
                "model.overrides.n_dense_layers: the planner's closed forms need blocks "
                "that are alike; plan with 0"
            )
        t = config.training
        p = config.parallelism
        self.config = config
        self.args = args
        self.pipeline = stages
        self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp = (
            axis_degrees(p)[axis] for axis in AXES
        )
        self.fsdp = self.dp_shard * self.cp
        self.world = self.pp * self.dp_replicate * self.fsdp * self.tp
        self.ep = p.expert_parallel_degree
        self.efsdp = self.fsdp * self.tp // self.ep
        """Ranks over which FSDP shards an expert."""
        self.experts_apart = self.experts > 0 and (self.tp > 1 or self.ep > 1)
        """FSDP gathers the experts of a block apart from it."""
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
        self.sums_whole_gradients = (
            sums_whole_gradients(config) and self.accumulation > 1 and stages is None
        )
        """The batches of a step add up in whole gradients, which are reduced after the last one."""
        self.replicas_apart = stages is None and sums_on_replicas(config)
        """The batches of a step add up on each replica, and are all-reduced after the last one."""
        self.tokens = rows * t.seq_len // self.cp
        self.compiled = compiles_blocks(config)
        self.loss_compiled = config.compile.enable and "loss" in config.compile.components
        self.element = BYTES[t.mixed_precision_param]
        """Bytes of a gathered parameter or an activation."""
        self.stored = BYTES[t.dtype]
        """Bytes of a sharded parameter."""
        self.reduced = BYTES[t.mixed_precision_reduce]
        """Bytes of a gradient in a reduction."""
        self.float8 = uses(config, FLOAT8)
        self.mx = uses(config, MX)
        recipe = config.quantize.linear.float8.recipe_name or "tensorwise"
        self.tensorwise = self.float8 and recipe == "tensorwise"
        self.float8_gather = (
            self.float8 and config.quantize.linear.float8.enable_fsdp_float8_all_gather
        )
        self.gathered = FP8 if self.float8_gather else self.element
        """Bytes of a block's parameter in FSDP's all-gather."""
        grouped = config.quantize.grouped_mm
        experts = "layers.0.moe.experts"
        self.eight_bit_experts = self.experts > 0 and (
            (uses(config, GROUPED_FLOAT8) and names_any(grouped.float8.fqns, experts))
            or (uses(config, GROUPED_MX) and names_any(grouped.mx.fqns, experts))
        )
        """Grouped products round their operands to 8 bits."""
        self.recompute = self._recompute()
        self.linears = list(self._linears())
        self.expert_params = sum(x.params for x in self.linears if x.experts)
        """Parameters of one block's experts on one expert-parallel rank."""
        self.expert_padding = self._expert_padding()
        """What FSDP gathers and reduces of experts, relative to their parameters."""
        self.block_params = sum(x.params for x in self.linears) + self._vector_params()
        """Parameters of one block on one tensor- and expert-parallel rank."""
        self.vocab_params = self.vocab * self.dim // self.tp
        """Parameters of the embedding, or of the output projection, on one tensor-parallel rank."""
        self.output = Linear(
            "output",
            self.dim,
            self.vocab // self.tp,
            self._eight_bit("output", self.dim, self.vocab),
            0.0,
        )
        self.async_tp = p.enable_async_tensor_parallel and self.tp > 1
        self.sharded_loss = self.tp > 1 and not p.disable_loss_parallel
        self.stages = list(self._stages())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.config.training.global_batch_size * self.seq_len

    @property
    def attention_flops(self) -> float:
        """FLOPs of one block's causal attention on one rank, forward, per token: the unmasked half
        of 4 S q.
        """
        return 2.0 * self.seq_len * self.q / self.tp

    def params(self, stage: Stage) -> int:
        """Parameters of a stage on one tensor- and expert-parallel rank, before FSDP shards
        them.
        """
        tied = stage.has_embedding and getattr(self.args, "tie_embeddings", False)
        ends = stage.has_embedding + (stage.has_output and not tied)
        return (
            stage.layers * self.block_params
            + ends * self.vocab_params
            + stage.has_output * self.dim
        )

    def shard(self, stage: Stage) -> float:
        """Parameters of a stage on one rank."""
        experts = stage.layers * self.expert_params
        return (
            self.params(stage) - experts
        ) / self.fsdp + experts * self.expert_padding / self.efsdp

    @property
    def expert_rows(self) -> float:
        """Rows per token that a rank sends to the experts; and with equal loads, that it gets for
        its own.
        """
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
            return Recompute(1 - ac.memory_budget, 1 - ac.memory_budget, 1.0)
        return Recompute(0.0, 0.0, 0.0)

    def _linears(self) -> Iterator[Linear]:
        """The linear layers in the order in which a block runs them: checkpointing by operation
        keeps every second.
        """
        d = self.dim
        q = self.q
        kv = self.kv
        f = self.ffn
        tp = self.tp
        network = "moe.experts" if self.experts else "feed_forward"
        sizes = {
            "attention.wq": (d, q),
            "attention.wk": (d, kv),
            "attention.wv": (d, kv),
            "attention.wo": (q, d),
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
            unused = (
                name == "feed_forward.w2" and self.compiled
            )  # no gradient needs it, and the compiler drops it
            recomputed = 0.0 if kept or unused else self.recompute.products
            if of_experts:
                rows = self.expert_rows
                experts = self.experts // self.ep
                yield Linear(
                    name, inputs, outputs, self.eight_bit_experts, recomputed, rows, experts
                )
            elif of_router:
                yield Linear(name, inputs, outputs, False, recomputed, 1 / tp, fp32=True)
            else:
                row_parallel = name.endswith(("wo", "w2"))
                local = (inputs // tp, outputs) if row_parallel else (inputs, outputs // tp)
                yield Linear(
                    name, *local, self._eight_bit(f"layers.0.{name}", inputs, outputs), recomputed
                )

    def _expert_padding(self) -> float:
        """Whole matrices are padded where the ranks don't divide their number: the first ranks then
        hold more.
        """
        own = max(1, self.experts // self.ep)
        splits_matrices = self.experts_apart and not any(
            width % self.efsdp for width in (self.dim, self.ffn)
        )
        return (
            1.0
            if splits_matrices or not self.experts
            else math.ceil(own / self.efsdp) * self.efsdp / own
        )

    def _vector_params(self) -> int:
        """Norms, of heads too, and biases of a block."""
        heads = 2 * self.args.head_dim if getattr(self.args, "qk_norm", False) else 0
        biases = (self.q + 2 * self.kv) // self.tp if getattr(self.args, "qkv_bias", False) else 0
        return 2 * self.dim + heads + biases

    def _eight_bit(self, name: str, inputs: int, outputs: int) -> bool:
        """Whether `model.converters` changes the linear layer of this name and size."""
        if not (self.float8 or self.mx):
            return False
        linear = self.config.quantize.linear
        filters = linear.float8.filter_fqns if self.float8 else linear.mx.filter_fqns
        multiple = (FLOAT8_MULTIPLE if self.float8 else MX_MULTIPLE) * self.tp
        if (
            any(part in name for part in filters if part != SMALL_LAYERS)
            or inputs % multiple
            or outputs % multiple
        ):
            return False
        filtered = self.float8 and SMALL_LAYERS in filters
        return not filtered or gains_by_float8(linear.float8.recipe_name, inputs, outputs)

    def _stages(self) -> Iterator[Stage]:
        if self.pipeline is None:
            yield Stage(0, self.args.n_layers, True, True)
            return
        for rank, names in zip(self.pipeline.ranks, self.pipeline.modules, strict=True):
            layers = sum(name.startswith("layers.") for name in names)
            yield Stage(rank, layers, "tok_embeddings" in names, "output" in names)


def hardware_flops(w: Workload) -> dict[tuple[str, str], float]:
    """FLOPs of one step on one rank by (`matmul` or `attention`, dtype): the pipeline's mean, with
    recomputation.
    """
    tokens = w.tokens * w.microbatches * w.accumulation / w.pp
    dtype = "float32" if w.element == FP32 else "bfloat16"
    products = [(x, w.args.n_layers) for x in w.linears] + [(w.output, 1)]
    out: dict[tuple[str, str], float] = {}
    for linear, count in products:
        key = "matmul", "float8" if linear.eight_bit else "float32" if linear.fp32 else dtype
        flops = (1 + BACKWARD_PRODUCTS + linear.recomputed) * linear.flops * count
        out[key] = out.get(key, 0.0) + flops * tokens
    attention = (
        (1 + BACKWARD_ATTENTION + w.recompute.attention) * w.attention_flops * w.args.n_layers
    )
    out["attention", dtype] = attention * tokens
    return out
