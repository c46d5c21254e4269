"""Peak memory that the allocator reserves on each pipeline rank, in closed form, by category.

The caching allocator keeps a pool for each stream, and FSDP's streams can't use what the compute
stream has freed, so parts that peak at different times still add up.

State and kept activations follow from the code to the byte (tests hold them to autograd). The
working set of a block, and what is held beyond the tensors, were adjusted by hand until eager runs
met traced steps (`tests/traced_step`), and compiled pipelines the published runs
(`python benchmarks/published/plan_accuracy.py --trace repo paper`); constants from there are marked
"adjusted".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torchtitan.models.costs import FP32
from torchtitan.optim.loss import CHUNK_GRADIENT_BYTES, LOGIT_BYTES
from torchtitan.parallel.kinds import Stage
from torchtitan.parallel.record import BYTES, Record
from torchtitan.tools.planner.pipeline_costs import InFlight, in_flight
from torchtitan.tools.planner.workload import Workload

GIB = 2**30
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "unsharded",
    "logits",
    "communication",
    "other",
)

LIBRARY_BYTES = 0.5 * GIB
"""Workspaces of matrix products, rotary tables and small tensors, on every rank. Estimate."""
PREFETCHED_BLOCKS = 2
"""Blocks whose weights are gathered at a time: FSDP gathers the next while one computes
(arXiv:2304.11277).
"""
GATHER_COPIES = 1.5
"""Buffers of FSDP's all-gather, in gathered blocks: the input and output of one, the output of
another. Adjusted.
"""
LOGIT_HOLE_BYTES = {"compiled": 2, "compiled, sharded": 0, "eager": 2, "eager, sharded": 4}
"""Bytes per logit that the allocator holds and nothing fits into. Adjusted. A compiled loss
has such holes in published runs only: neither inductor's code for an H100 nor the replayed
allocator has them.
"""
RECOMPUTED_COPIES = 6
"""Times that a checkpointed block, unless compiled, keeps everything in a backward of weights only:
torch recomputes it for each parameter and keeps the results. As traced for a Llama, whose blocks
have 9 parameters.
"""
COMPILED_PIPELINE_HOLES = 0.5
"""Bytes that a compiled pipeline holds beyond its tensors, per byte of a block's working set:
alternating forwards and backwards leave holes. Adjusted.
"""
COMPILED_PIPELINE_BUFFERS = 2
"""Blocks in gathered type, and in fp32, that a compiled pipeline's communication holds. Adjusted.
"""


BlockCounts = Sequence[tuple[Record, int]]
"""Kinds of blocks of a stage, with how many there are of each."""


@dataclass(frozen=True)
class Memory:
    """One pipeline rank's peak."""

    by_category: Mapping[str, float]
    """Bytes of each of `CATEGORIES`."""

    @property
    def reserved(self) -> float:
        """Bytes that the allocator reserves on the device."""
        return sum(self.by_category.values())


def predict_memory(w: Workload) -> Memory:
    """Memory of the pipeline rank that needs most."""
    return max((memory_of(w, rank) for rank in range(w.pp)), key=lambda memory: memory.reserved)


def memory_of(w: Workload, pp_rank: int) -> Memory:
    """Peak of one pipeline rank, with all its stages."""
    stages = w.stages_of(pp_rank)
    blocks = w.block_counts(stages)
    state = {} if w.config.training.enable_cpu_offload else state_bytes(w, stages)
    logits, hole = _logits(w) if any(stage.has_output for stage in stages) else (0.0, 0.0)
    working = max(
        (_working_bytes(b) * b.tokens + _expert_gradients(b) for b, _ in blocks), default=0
    )
    sizes = state | {
        "activations": max(0.0, working - logits),
        "logits": logits,
        "other": LIBRARY_BYTES + hole,
    }
    if w.pipeline is None:
        more = _whole_model(w, blocks, state.get("gradients", 0.0))
    else:
        more = _pipeline_rank(w, pp_rank, blocks, working)
    return Memory({name: sizes.get(name, 0.0) + more.get(name, 0.0) for name in CATEGORIES})


def _whole_model(w: Workload, blocks: BlockCounts, gradients: float) -> dict[str, float]:
    """Bytes that a model without a pipeline needs beside its state, logits and working set.

    Args:
        gradients: bytes of the state's.
    """
    (model,) = w.stages
    activations = _kept_bytes(w, w.stages) + _in_transit_bytes(w, w.stages)
    sizes = {"activations": activations, "communication": 0.0}
    largest = sorted((b.block_params for b, count in blocks for _ in range(count)), reverse=True)
    ends = [w.element * size for size in w.ends(model)]
    gathered = sum(largest[:PREFETCHED_BLOCKS] if w.regathers else largest)
    # The output's weight stays for the backward; embeddings aren't needed there.
    unsharded = sum(ends[-1:] if w.regathers else ends) + w.gathered_bytes * gathered
    sizes["unsharded"] = w.copied_bytes * w.params(model) if w.stays_whole else unsharded
    kinds = [block for block, _ in blocks]
    if w.fsdp > 1 or any(block.experts_apart for block in kinds):
        gathers = [max(map(_gather_buffers, kinds)), *ends]
        # The root's gathered weights are not freed before a block is gathered.
        most = sum(gathers) if len(ends) == 1 else max(gathers)
        sizes["communication"] = most + max(map(_reduced_bytes, kinds))
    whole_gradients = FP32 * w.params(model)
    if w.sums_whole_gradients and gradients < whole_gradients:
        sizes["unsharded"] += whole_gradients
    elif w.accumulation > 1 and w.replicas_apart and not gradients:
        sizes["communication"] += FP32 * w.shard(model)
    return sizes


def _pipeline_rank(
    w: Workload, pp_rank: int, blocks: BlockCounts, working: float
) -> dict[str, float]:
    """Bytes that a pipeline rank's stages need beside their state, logits and working set.

    Args:
        working: bytes of a block's working set.
    """
    stages = w.stages_of(pp_rank)
    activations, transfers = pipeline_bytes(w, pp_rank)
    sizes = {"activations": activations, "communication": transfers}
    if any(stage.has_output for stage in stages):
        sizes["logits"] = _waiting_losses(w, pp_rank)
    if not w.stays_whole:  # gradients are summed over the microbatches before they are reduced
        params = sum(count * block.block_params for block, count in blocks)
        ends = sum(sum(w.ends(stage)) for stage in stages)
        sizes["unsharded"] = w.gathered_bytes * params + w.element * ends + FP32 * (params + ends)
    block_params = max((block.block_params for block, _ in blocks), default=0)
    buffers = FP32
    if w.compiled:
        buffers += COMPILED_PIPELINE_BUFFERS * (w.gathered_bytes + FP32)
        sizes["other"] = working * COMPILED_PIPELINE_HOLES
    sizes["communication"] += buffers * block_params * (w.fsdp > 1)
    return sizes


def _gather_buffers(w: Record) -> float:
    """Bytes of the buffers in which blocks' weights are gathered."""
    return GATHER_COPIES * w.gathered_bytes * sum(unit.params for unit in w.units)


def _reduced_bytes(w: Record) -> float:
    """Bytes of a block's reduced gradients."""
    return w.reduced_bytes * sum(unit.params / unit.ranks for unit in w.units)


def state_bytes(w: Workload, stages: Sequence[Stage]) -> dict[str, float]:
    """Parameters, gradients and optimizer state of a rank's shard, with the weight average."""
    optimizer = w.config.optimizer
    shard = sum(map(w.shard, stages))
    moments = 2 * shard
    if optimizer.name == "Muon":  # one moment for a block's matrices, AdamW's two for the rest
        for block, count in w.block_counts(stages):
            matrices = sum(
                x.params / (block.efsdp / block.expert_padding if x.experts else block.fsdp)
                for x in block.linears
            )
            moments -= count * matrices
    return {
        "parameters": w.stored_bytes * shard,
        "gradients": 0.0 if optimizer.early_step_in_backward else FP32 * shard,
        "optimizer": BYTES[optimizer.state_dtype] * moments + FP32 * shard * w.config.ema.enable,
    }


def pipeline_bytes(w: Workload, pp_rank: int) -> tuple[float, float]:
    """Activations of the microbatches that the schedule keeps at a time, and the transfers that are
    then received ahead or being sent.

    A stage keeps its output too.
    """
    assert w.pipeline is not None
    moments = in_flight(w.pipeline, w.microbatches, pp_rank)
    return max(((_moment_bytes(w, m), m.transfers * w.hidden_bytes) for m in moments), key=sum)


def _moment_bytes(w: Workload, moment: InFlight) -> float:
    """Activations that are in flight at a moment."""
    activations = recomputed = transit_bytes = 0.0
    for stage, count in moment.microbatches.items():
        per_microbatch, in_transit = _stage_bytes(w, w.stages[stage])
        activations += count * per_microbatch
        transit_bytes = max(transit_bytes, in_transit)
        if postponed := moment.postponed.get(stage, 0):
            blocks = w.block_counts([w.stages[stage]])
            activations += postponed * w.tokens * sum(n * b.postponed_bytes for b, n in blocks)
            if not w.compiled:
                again = w.recompute.pointwise * sum(n * b.block_bytes for b, n in blocks)
                recomputed = max(recomputed, RECOMPUTED_COPIES * w.tokens * again)
    return transit_bytes + activations + recomputed


@lru_cache(maxsize=64)  # a rank's stages are mostly alike
def _stage_bytes(w: Workload, stage: Stage) -> tuple[float, float]:
    """Bytes of one microbatch that a stage keeps, with its output, and bytes in transit."""
    return _kept_bytes(w, [stage]) + w.hidden_bytes, _in_transit_bytes(w, [stage])


def _kept_bytes(w: Workload, stages: Sequence[Stage]) -> float:
    """Bytes of one microbatch that all blocks of stages keep on the device."""
    kept = sum(count * block.saved_bytes for block, count in w.block_counts(stages))
    return w.tokens * kept - offloaded_bytes(w, stages)


def _waiting_losses(w: Workload, pp_rank: int) -> float:
    """Bytes that the losses of all microbatches but one keep for their backward: in breadth-first
    schedules, and in schedules that split it.

    A chunked loss keeps gradients of hidden states and, in fp32, of the output weight, a compiled
    one logits, an eager one log-softmax.
    """
    assert w.pipeline is not None
    last = len(w.stages) - 1
    moments = in_flight(w.pipeline, w.microbatches, pp_rank)
    if w.config.training.loss_chunks > 1:
        most = max(moment.microbatches[last] for moment in moments)
        return (most - 1) * (w.hidden_bytes + FP32 * w.vocab_params)
    # After the backward of the hidden states, the gradient of the logits waits for the
    # weight's.
    logits = w.tokens * w.vocab / (w.tp if w.sharded_loss else 1)
    loss = w.element if w.loss_compiled else FP32
    bytes_per_logit = 0
    for moment in moments:
        postponed_losses = moment.postponed.get(last, 0)
        open_losses = max(0, moment.microbatches[last] - postponed_losses - 1)
        bytes_per_logit = max(bytes_per_logit, open_losses * loss + postponed_losses * w.element)
    return logits * bytes_per_logit


def offloaded_bytes(w: Workload, stages: Sequence[Stage]) -> float:
    """Bytes of one microbatch that stages keep in host memory."""
    count, size = w.offloaded(stages)
    return count * size


def _in_transit_bytes(w: Workload, stages: Sequence[Stage]) -> float:
    """Bytes of offloaded blocks still on the device: the current one and the one being copied."""
    count, size = w.offloaded(stages)
    return min(2, count) * size


def _working_bytes(w: Record) -> float:
    """Bytes per token in a block's backward: recomputed, gradients, gathered by collectives.

    The numbers of d, q and f are adjusted: tensors that the compiled and the eager backward hold at
    its peak.
    """
    d = w.dim
    heads = w.heads
    inner = w.cost.inner
    # gradients of an expert's rows and of its products; and copies before and after the exchange
    if w.experts:
        per_row = 3 * d + 4 * inner if w.ep > 1 else d + 2 * inner
        block = w.block_bytes + w.element * w.expert_rows * per_row
    elif w.compiled:
        gathers = (1 if w.async_tp else 2) * d if w.tp > 1 else 0
        widths = (6 * d + 8 * heads.queries + 9 * inner) / w.tp
        block = w.element * (widths + 2 * d + gathers)
    else:
        # Partial sums, gathered gradients, and the copies that put them in order along the
        # sequence.
        gathers = 8 * d if w.tp > 1 else 0
        block = w.block_bytes + w.element * ((d + 2 * inner) / w.tp + gathers)
    # Keys and values of all ranks, and their gradients in fp32.
    ring = (heads.keys + heads.values) / w.tp * w.cp * (w.element + FP32) if w.cp > 1 else 0
    return block + ring


def _expert_gradients(w: Record) -> float:
    """Bytes of the experts' gradients, and of the previous block's while they are reduced.

    In a dense block they are small against the activations.
    """
    if not w.experts:
        return 0.0
    block = w.block_params + w.expert_params * (w.expert_padding - 1)
    return w.element * w.expert_params + (w.reduced_bytes * block if w.pipeline is None else 0.0)


def _logits(w: Workload) -> tuple[float, float]:
    """Bytes of logits, loss and their gradients, and of the holes they leave in the allocator."""
    chunks = w.config.training.loss_chunks
    variant = ("compiled" if w.loss_compiled else "eager") + ", sharded" * w.sharded_loss
    logits = w.tokens * w.vocab / (w.tp if w.sharded_loss else 1) / chunks
    more = 4 if w.config.training.z_loss else 0  # fp32 logits, kept for its backward
    weight = CHUNK_GRADIENT_BYTES * w.vocab_params if chunks > 1 else 0
    # Tensor parallelism gathers the whole sequence's hidden states; without async TP the layers'
    # gathers left holes.
    hidden = w.element * w.dim * w.tokens / chunks if w.tp > 1 else 0
    return (
        (LOGIT_BYTES[variant] + more) * logits + weight + hidden,
        LOGIT_HOLE_BYTES[variant] * logits + (0 if w.async_tp else hidden),
    )
