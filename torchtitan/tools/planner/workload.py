"""A configuration reduced to the inputs of the planner's formulas.

Notation of `costs.py` and `memory.py`: d is the width of the residual stream, q and kv the widths
of all query heads and of all key (or value) heads, f the inner width of the feed-forward network or
of an expert, V the vocabulary, S the sequence length, T the tokens of one microbatch on one rank
before tensor parallelism, E a block's experts, and k a token's, all equally loaded.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchtitan.config.converters import FLOAT8, MX, uses
from torchtitan.config.derive import (
    axis_degrees,
    compiles_blocks,
    gradient_accumulation_steps,
    sums_on_replicas,
    sums_whole_gradients,
)
from torchtitan.config.sections.schema import Config
from torchtitan.models.args import DecoderArgs
from torchtitan.parallel.pipeline.split import PipelinePlan
from torchtitan.tools.planner.block import FORMULA_FIELDS, Mixing, kind_of, mixing_of, vector_params
from torchtitan.tools.planner.linears import Linear, block_linears, in_eight_bits, recompute_of
from torchtitan.tools.planner.stages import PlannedStage, split_stages
from torchtitan.utils.errors import UserError

BYTES = {"bfloat16": 2, "float32": 4}
FP32 = 4
FP8 = 1
"""Bytes of an element. Gradients add up in fp32."""


@dataclass(frozen=True)
class Software:
    """Differences of a published run's software from this project's; none in our own plans."""

    kv_repeated: bool = False
    """Copies keys and values for every query head before attention, as TorchTitan once did."""
    ends_in_one_unit: bool = False
    """FSDP gathers the embeddings and the output together, as TorchTitan once did."""
    fused_dispatch: bool = False
    """Sends a token once to each rank with experts for it, over the network once to each node, in 8
    bits if experts compute in them, and the host doesn't wait (DeepEP, HybridEP).
    """
    overlaps_experts: bool = False
    """Exchanges the rows of one microbatch while another computes."""
    launches_alone: bool = False
    """Launches kernels one by one, fused as they are, like eager operations."""
    cuda_graphs: bool = False
    """Replays launches from CUDA graphs, so the host is never late."""


OURS = Software()


def _check_fields(config: Config, args: Any) -> DecoderArgs:
    """`args`, if the formulas cover the model.

    Raises:
        UserError: they don't.
    """
    if not isinstance(args, DecoderArgs):
        raise UserError(
            "model.name: the planner's closed forms are those of the decoder; the hyper-parameters "
            f"of {config.model.name} are no DecoderArgs, so it can't be planned"
        )
    fields = type(args).model_fields
    for name in sorted(fields.keys() - FORMULA_FIELDS - args.free_of_cost):
        if getattr(args, name) != fields[name].default:
            raise UserError(
                f"model.overrides.{name}: the planner's closed forms don't know it, so memory and "
                "time would be wrong; add it to torchtitan/tools/planner/block.py, or, if it costs "
                f"next to nothing, to free_of_cost of {type(args).__name__}"
            )
    return args


_BLOCK_PROPERTIES = ("mixing", "linears", "expert_params", "block_params")


class Workload:
    """One training step of `config` on each rank.

    Properties of a block are the most common kind's. `blocks` has a workload for each kind,
    as if all blocks were of that kind.
    """

    def __init__(
        self,
        config: Config,
        args: Any,
        stages: PipelinePlan | None,
        software: Software = OURS,
        *,
        like: "Workload | None" = None,
    ):
        """
        Args:
            config: derived and validated.
            args: the model's arguments.
            stages: the pipeline; None without one.
            like: a workload of the same model, tensor- and expert-parallel degrees, and
            checkpointing, whose blocks are shared: a search makes thousands.

        Raises:
            UserError: the formulas don't cover this model family.
        """
        t = config.training
        p = config.parallelism
        self.config = config
        self.args = args = _check_fields(config, args)
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
        rows = stages.microbatch_size if stages else t.local_batch_size
        self.microbatches = t.local_batch_size // rows
        self.accumulation = gradient_accumulation_steps(config)
        self.tokens = rows * t.seq_len // self.cp
        self.compiled = compiles_blocks(config)
        self.loss_compiled = config.compile.enable and "loss" in config.compile.components
        self.float8 = uses(config, FLOAT8)
        self.mx = uses(config, MX)
        self.recompute = recompute_of(config.activation_checkpoint)
        self.predictions = 1 + args.n_mtp
        """Tokens that each token's hidden states predict."""
        self.software = software
        if like is None:
            kinds = [kind_of(args, i) for i in range(args.n_layers + self.predictions - 1)]
            self._kinds = list(dict.fromkeys(kinds))
            self._kind_of_layer = tuple(self._kinds.index(kind) for kind in kinds)
            self.kind = Counter(kinds).most_common(1)[0][0]
        else:
            self._kinds, self._kind_of_layer, self.kind = (
                like._kinds,
                like._kind_of_layer,
                like.kind,
            )
        self._shards: dict[PlannedStage, float] = {}
        self.blocks = [copy(self) for _ in self._kinds]
        """A workload for each kind of block."""
        for block, kind in zip(self.blocks, self._kinds, strict=True):
            block.kind = kind
        if like is not None:
            for mine, other in zip([self, *self.blocks], [like, *like.blocks], strict=True):
                for name in _BLOCK_PROPERTIES:
                    setattr(mine, name, getattr(other, name))
        eight_bit = in_eight_bits(config, "output", self.dim, self.vocab)
        self.output = Linear(
            "output", self.dim, self.vocab // self.tp, eight_bit, recompute_share=0.0
        )
        self.vocab_params = self.vocab * self.dim // self.tp
        """Parameters of the embedding, or the output projection, on one tensor-parallel rank."""
        self._split = split_stages(stages, self._kind_of_layer, len(self._kinds))
        self.stages = self._split.stages

    # ---- of a kind of block

    @property
    def experts(self) -> int:
        """Experts of a block."""
        return self.args.n_experts if self.kind.experts else 0

    @property
    def top_k(self) -> int:
        return self.args.experts_per_token if self.kind.experts else 0

    @property
    def ffn(self) -> int:
        return self.args.expert_dim if self.kind.experts else self.args.ffn_dim

    @cached_property
    def mixing(self) -> Mixing:
        """The mixing of tokens."""
        return mixing_of(self.args, self.kind.mixing, self.seq_len, self.software.kv_repeated)

    @cached_property
    def linears(self) -> list[Linear]:
        return list(block_linears(self.config, self.args, self.kind, self.mixing))

    def block_counts(self, stages: Iterable[PlannedStage]) -> list[tuple["Workload", int]]:
        """The kinds of blocks on these stages, with how many there are of each."""
        counts = [sum(column) for column in zip(*(stage.kinds for stage in stages), strict=True)]
        pairs = zip(self.blocks, counts, strict=True)
        return [(block, count) for block, count in pairs if count]

    # ---- of the model

    @cached_property
    def efsdp(self) -> int:
        """Ranks over which FSDP shards an expert."""
        return self.fsdp * self.tp // self.ep

    @cached_property
    def experts_apart(self) -> bool:
        """Whether FSDP gathers a block's experts separately."""
        return self.experts > 0 and (self.tp > 1 or self.ep > 1)

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
    def stays_whole(self) -> bool:
        """Whether FSDP manages no weight: there is nothing to gather, cast, reduce or offload."""
        alone = self.fsdp * self.dp_replicate * self.tp == 1
        types = {self.element, self.reduced_bytes, self.gathered_bytes}
        offload = self.config.training.enable_cpu_offload
        return alone and types == {self.stored_bytes} and not (self.experts_apart or offload)

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
        vectors = vector_params(self.args, self.kind, self.mixing, self.tp, ep=self.ep)
        return sum(x.params for x in self.linears) + vectors

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
    def by_heads(self) -> bool:
        """Whether context parallelism gives each rank whole rows of some heads."""
        ulysses = self.config.parallelism.context_parallel_method == "ulysses"
        return self.cp > 1 and (ulysses or self.mixing.module == "delta")

    @property
    def attention_flops(self) -> float:
        """FLOPs of one block's mixing of tokens in its forward, per token."""
        return self.mixing.flops / self.tp

    def params(self, stage: PlannedStage) -> int:
        """Parameters of a stage on one tensor- and expert-parallel rank, before FSDP."""
        blocks = sum(count * block.block_params for block, count in self.block_counts([stage]))
        return blocks + sum(self.ends(stage))

    def ends(self, stage: PlannedStage) -> list[int]:
        """Parameters of FSDP's units besides blocks: the token embeddings; and the last norm with
        the output projection. Tied, they are one unit.
        """
        if stage.has_embedding and self.args.tie_embeddings:
            return [self.vocab_params + self.dim]
        first = [self.vocab_params] * stage.has_embedding
        ends = first + [self.vocab_params + self.dim] * stage.has_output
        return [sum(ends)] if self.software.ends_in_one_unit and len(ends) > 1 else ends

    def shard(self, stage: PlannedStage) -> float:
        """Parameters of a stage on one rank."""
        if stage not in self._shards:
            counts = self.block_counts([stage])
            dense_params = self.params(stage) - sum(n * block.expert_params for block, n in counts)
            expert_params = sum(
                n * block.expert_params * block.expert_padding for block, n in counts
            )
            self._shards[stage] = dense_params / self.fsdp + expert_params / self.efsdp
        return self._shards[stage]

    @property
    def expert_rows(self) -> float:
        """Rows per token that a rank sends to experts and, with equal loads, receives."""
        return self.top_k / self.tp

    def stages_of(self, pp_rank: int) -> Sequence[PlannedStage]:
        return self._split.of_rank[pp_rank]

    @property
    def unlike_ranks(self) -> tuple[int, ...]:
        """See `StageSplit`."""
        return self._split.unlike_ranks

    @cached_property
    def expert_padding(self) -> float:
        """Elements that FSDP gathers and reduces for the experts, relative to their parameters.

        Whole matrices are padded where the ranks don't divide their number.
        """
        if not self.experts:
            return 1.0
        divides = self.dim % self.efsdp == 0 and self.ffn % self.efsdp == 0
        if self.experts_apart and divides:  # splits each matrix instead
            return 1.0
        local_experts = max(1, self.experts // self.ep)
        return math.ceil(local_experts / self.efsdp) * self.efsdp / local_experts
