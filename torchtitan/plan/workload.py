"""A configuration as the numbers that the closed forms take: sizes, tokens, bytes, and what each stage holds.

Notation of `costs.py` and `memory.py`: d width of the residual stream, q and kv widths of all query and of all key or
value heads, f inner width of the feed-forward network, V vocabulary, S sequence length. T tokens of one microbatch on
one rank, before tensor parallelism splits them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import AXES, axis_degrees, gradient_accumulation_steps
from torchtitan.config.schema import Config
from torchtitan.config.stages import PipelineStages
from torchtitan.config.support import FLOAT8, MX, SMALL_LAYERS, compiles_blocks, gains_by_float8, uses
from torchtitan.utils.errors import UserError

_SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim")
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block as one rank sees it."""

    name: str
    inputs: int
    outputs: int
    narrow: bool
    """Its operands are 8 bits wide."""
    again: float
    """Share of the blocks whose backward computes it again."""

    @property
    def flops(self) -> float:
        """Of the forward, for one token."""
        return 2.0 * self.inputs * self.outputs


@dataclass(frozen=True)
class Stage:
    """Part of the model that runs as a whole."""

    rank: int
    """Along `pp`."""
    layers: int
    embeds: bool
    projects: bool
    """Has the output projection, and computes the loss."""


class Workload:
    """One training step of `config` on each rank."""

    def __init__(self, config: Config, args: Any, stages: PipelineStages | None, *, kv_repeated: bool = False):
        """
        Args:
            kv_repeated: keys and values are copied for every query head before attention, as TorchTitan did when its
                tables were measured. This project's attention takes them as they are.

        Raises:
            UserError: a model family whose sizes the closed forms don't know.
        """
        if missing := [name for name in _SIZES if not hasattr(args, name)]:
            raise UserError(
                f"model.name: the planner's closed forms know models with {', '.join(_SIZES)}; "
                f"{config.model.name} has no {', '.join(missing)}"
            )
        t, p = config.training, config.parallelism
        self.config, self.args, self.pipeline = config, args, stages
        self.pp, self.replicate, self.shard, self.cp, self.tp = (axis_degrees(p)[axis] for axis in AXES)
        self.fsdp = self.shard * self.cp
        self.world = self.pp * self.replicate * self.fsdp * self.tp
        self.dim, self.vocab, self.ffn, self.seq_len = args.dim, args.vocab_size, args.ffn_dim, t.seq_len
        self.q, self.kv = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.kv_sent = self.q if kv_repeated else self.kv
        """Width of keys, or values, as attention and context parallelism have them."""
        rows = stages.microbatch_size if stages else t.local_batch_size
        self.microbatches = t.local_batch_size // rows
        self.accumulation = gradient_accumulation_steps(config)
        self.tokens = rows * t.seq_len // self.cp
        self.compiled = compiles_blocks(config)
        self.loss_compiled = config.compile.enable and "loss" in config.compile.components
        self.width = BYTES[t.mixed_precision_param]
        """Bytes of a parameter or activation in compute."""
        self.stored = BYTES[t.dtype]
        self.float8, self.mx = uses(config, FLOAT8), uses(config, MX)
        self.recipe = config.quantize.linear.float8.recipe_name or "tensorwise"
        self.tensorwise = self.float8 and self.recipe == "tensorwise"
        self.narrow_gather = self.float8 and config.quantize.linear.float8.enable_fsdp_float8_all_gather
        self.linears = list(self._linears())
        _, self.attention_again, self.pointwise_again = self._again()
        self.block_params = sum(x.inputs * x.outputs for x in self.linears) + 2 * self.dim
        """Of one block on one tensor-parallel rank."""
        self.vocab_params = self.vocab * self.dim // self.tp
        self.head_narrow = self._narrow("output", self.dim, self.vocab)
        self.async_tp = p.enable_async_tensor_parallel and self.tp > 1
        self.sharded_loss = self.tp > 1 and not p.disable_loss_parallel
        self.stages = list(self._stages())

    @property
    def tokens_per_step(self) -> int:
        """Of the whole world."""
        return self.config.training.global_batch_size * self.seq_len

    def params(self, stage: Stage) -> int:
        """Parameters of a stage on one tensor-parallel rank, before FSDP shards them."""
        ends = stage.embeds + (stage.projects and not (stage.embeds and getattr(self.args, "tie_embeddings", False)))
        return stage.layers * self.block_params + ends * self.vocab_params + stage.projects * self.dim

    def of_rank(self, pp_rank: int) -> list[Stage]:
        return [stage for stage in self.stages if stage.rank == pp_rank]

    def _again(self) -> tuple[float, float, float]:
        """Shares of the matrix products, attention and pointwise work of a block that its backward does again."""
        ac = self.config.activation_checkpoint
        if ac.mode == "full":
            return 1.0, 1.0, 1.0
        if ac.mode == "selective" and ac.selective_ac_option == "op":
            return 1.0, 0.0, 1.0  # of the products, those that aren't kept
        if ac.mode == "selective":
            return (1 / int(ac.selective_ac_option),) * 3
        if ac.mode == "memory_budget":
            return 1 - ac.memory_budget, 1 - ac.memory_budget, 1.0
        return 0.0, 0.0, 0.0

    def _linears(self) -> Iterator[Linear]:
        """In the order in which a block runs them: selective checkpointing keeps every second."""
        d, q, kv, f, tp = self.dim, self.q, self.kv, self.ffn, self.tp
        columns = [("attention.wq", d, q), ("attention.wk", d, kv), ("attention.wv", d, kv)]
        columns += [("attention.wo", q, d), ("feed_forward.w1", d, f), ("feed_forward.w3", d, f)]
        ac = self.config.activation_checkpoint
        by_operation = ac.mode == "selective" and ac.selective_ac_option == "op"
        number = 0
        for name, inputs, outputs in [*columns, ("feed_forward.w2", f, d)]:
            over_inputs = name.endswith(("wo", "w2"))
            sizes = (inputs // tp, outputs) if over_inputs else (inputs, outputs // tp)
            free = not any(part in name for part in ac.per_op_sac_force_recompute_mm_shapes_by_fqns)
            number += free
            kept = by_operation and free and number % 2 == 1
            # Nothing needs the last product's result: a compiler leaves it out.
            unused = name == "feed_forward.w2" and self.compiled
            again = 0.0 if kept or unused else self._again()[0]
            yield Linear(name, *sizes, self._narrow(f"layers.0.{name}", inputs, outputs), again)

    def _narrow(self, name: str, inputs: int, outputs: int) -> bool:
        if not (self.float8 or self.mx):
            return False
        linear = self.config.quantize.linear
        filters = linear.float8.filter_fqns if self.float8 else linear.mx.filter_fqns
        unit = (16 if self.float8 else 32) * self.tp
        if any(part in name for part in filters if part != SMALL_LAYERS) or inputs % unit or outputs % unit:
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
    """FLOPs of one step on one rank, the mean over the pipeline, by kind and type; recomputation is included.

    Matrix products cost 2 FLOPs per weight and token forward, 4 backward; causal attention 2 S q per token forward
    (half of the square is masked) and 2.5 times that backward (Dao, arXiv:2307.08691).
    """
    tokens = w.tokens * w.microbatches * w.accumulation / w.pp
    dtype = "float32" if w.width == 4 else "bfloat16"
    out: dict[tuple[str, str], float] = {}
    work = [(x.narrow, (3 + x.again) * x.flops * w.args.n_layers) for x in w.linears]
    for narrow, flops in [*work, (w.head_narrow, 6.0 * w.dim * w.vocab / w.tp)]:
        key = "matmul", "float8" if narrow else dtype
        out[key] = out.get(key, 0.0) + flops * tokens
    attention = 2.0 * w.seq_len * w.q / w.tp * w.args.n_layers
    out["attention", dtype] = (3.5 + w.attention_again) * attention * tokens
    return out
