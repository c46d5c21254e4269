"""Peak memory in closed form, by part: what the allocator reserves on each pipeline rank.

The caching allocator keeps a pool for each stream, and FSDP's streams can't use what the compute
stream has freed, so parts that peak at different times still add up.

State and kept activations follow from the code to the byte (tests hold them to autograd). The
working set of a block, and what is held beyond the tensors, were adjusted by hand until eager runs
met traced steps (`tests/traced_step`), and compiled pipelines the published runs
(`python benchmarks/published/plan_accuracy.py --trace repo paper`); constants from there are marked
"adjusted".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torchtitan.config.derive import offloaded_blocks, selects_operations
from torchtitan.tools.planner.linears import experts_in_eight_bits
from torchtitan.tools.planner.pipeline_costs import InFlight, in_flight
from torchtitan.tools.planner.workload import BYTES, FP32, PlannedStage, Workload

GIB = 2**30
PARTS = (
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
LOGIT_BYTES = {"compiled": 4, "compiled, sharded": 10, "eager": 12, "eager, sharded": 16}
"""Bytes per logit at the peak. Compiled: bf16 logits and their gradient; sharding the vocabulary
ends inductor's kernel at each all-reduce, with two copies in fp32 beside the logits. Eager: bf16
logits, fp32 logits, softmax and gradient less what is freed by then; sharding the vocabulary keeps
one more copy in fp32. As traced.
"""
LOGIT_HOLE_BYTES = {"compiled": 2, "compiled, sharded": 0, "eager": 2, "eager, sharded": 4}
"""Bytes per logit that the allocator holds and nothing fits into. Adjusted. That of a compiled loss
is in published runs only: neither inductor's code for an H100 nor the replayed allocator has it.
"""
CHUNK_GRADIENT_BYTES = 8
"""Bytes per parameter of the output projection with a chunked loss: the sum of its gradient in fp32
(4), a chunk's gradient in bf16 (2), and the result in bf16 (2).
"""
ROUTER_BYTES = 70
"""Bytes per row of an expert for its place in both orders, weight and expert, on its way there and
back. As traced.
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


Counted = Sequence[tuple[Workload, int]]
"""Kinds of blocks of a stage, with how many there are of each."""


@dataclass(frozen=True)
class Memory:
    """One pipeline rank's peak."""

    parts: Mapping[str, float]
    """Bytes by part, `PARTS`."""

    @property
    def reserved(self) -> float:
        """Bytes that the allocator takes from the device."""
        return sum(self.parts.values())


def predict_memory(w: Workload) -> Memory:
    """Memory of the pipeline rank that needs most."""
    return max((memory_of(w, rank) for rank in range(w.pp)), key=lambda memory: memory.reserved)


def memory_of(w: Workload, pp_rank: int) -> Memory:
    """Peak of one pipeline rank, with all its stages."""
    stages = w.stages_of(pp_rank)
    parts = dict.fromkeys(PARTS, 0.0)
    if not w.config.training.enable_cpu_offload:
        parts |= state_bytes(w, stages)
    total = sum(map(w.params, stages))
    blocks = w.counted(stages)
    params = sum(count * block.block_params for block, count in blocks)
    ends = [w.element * size for stage in stages for size in w.ends(stage)]
    has_output = any(stage.has_output for stage in stages)
    logits, hole = _logits(w) if has_output else (0.0, 0.0)
    kinds = [block for block, _ in blocks]
    working = max((_working_bytes(b) * b.tokens + _expert_gradients(b) for b in kinds), default=0)
    parts["logits"], parts["other"] = logits, LIBRARY_BYTES + hole
    if w.pipeline is None:
        activations = sum(count * _saved_bytes(block) * block.tokens for block, count in blocks)
        activations = activations - offloaded_bytes(blocks) + _in_transit_bytes(blocks)
        parts["activations"] = activations + max(0.0, working - logits)
        largest = sorted(
            (b.block_params for b, count in blocks for _ in range(count)), reverse=True
        )
        never = w.config.parallelism.fsdp_reshard_after_forward == "never"
        gathered = params if never else sum(largest[:PREFETCHED_BLOCKS])
        # The output's weight stays for the backward; embeddings aren't needed there.
        if not w.stays_whole:
            parts["unsharded"] = sum(ends if never else ends[-1:]) + w.gathered * gathered
        if w.fsdp > 1 or any(block.experts_apart for block in kinds):
            gathers = [max(map(_gather_buffers, kinds)), *ends]
            # What the root gathers itself is not freed before a block is gathered.
            most = sum(gathers) if len(ends) == 1 else max(gathers)
            parts["communication"] = most + max(map(_reduced_bytes, kinds))
        if w.sums_whole_gradients and parts["gradients"] < FP32 * total:
            parts["unsharded"] += FP32 * total
        elif w.accumulation > 1 and w.replicas_apart and not parts["gradients"]:
            parts["communication"] += FP32 * sum(map(w.shard, stages))
        return Memory(parts)
    activations, transfers = pipeline_bytes(w, pp_rank)
    parts["activations"] = activations + max(0.0, working - logits)
    if has_output:
        parts["logits"] += _waiting_losses(w, pp_rank)
    if not w.stays_whole:  # gradients are summed over the microbatches before they are reduced
        parts["unsharded"] = w.gathered * params + sum(ends) + FP32 * total
    block_params = max((block.block_params for block in kinds), default=0)
    parts["communication"] = transfers + FP32 * block_params * (w.fsdp > 1)
    if w.compiled and blocks:
        buffers = COMPILED_PIPELINE_BUFFERS * (w.gathered + FP32) * block_params
        parts["communication"] += buffers * (w.fsdp > 1)
        parts["other"] += working * COMPILED_PIPELINE_HOLES
    return Memory(parts)


def _gather_buffers(w: Workload) -> float:
    """Bytes of the buffers in which blocks' weights are gathered."""
    padded = w.expert_params * w.expert_padding
    return GATHER_COPIES * w.gathered * (w.block_params - w.expert_params + padded)


def _reduced_bytes(w: Workload) -> float:
    """Bytes of a block's reduced gradients."""
    dense = w.block_params - w.expert_params
    return w.reduced * (dense / w.fsdp + w.expert_params * w.expert_padding / w.efsdp)


def state_bytes(w: Workload, stages: Sequence[PlannedStage]) -> dict[str, float]:
    """Parameters, gradients and optimizer state of a rank's shard, with the weight average."""
    optimizer = w.config.optimizer
    shard = sum(map(w.shard, stages))
    moments = 2 * shard
    if optimizer.name == "Muon":  # one moment for a block's matrices, AdamW's two for the rest
        for block, count in w.counted(stages):
            matrices = sum(
                x.params / (block.efsdp / block.expert_padding if x.experts else block.fsdp)
                for x in block.linears
            )
            moments -= count * matrices
    return {
        "parameters": w.stored * shard,
        "gradients": 0.0 if optimizer.early_step_in_backward else FP32 * shard,
        "optimizer": BYTES[optimizer.state_dtype] * moments + FP32 * shard * w.config.ema.enable,
    }


def hidden_bytes(w: Workload) -> float:
    """Bytes of a microbatch's hidden states between stages, split by tensor parallelism; and of the
    embeddings that travel with them where further tokens are predicted.
    """
    return w.element * w.tokens * w.predictions * w.dim / w.tp


def pipeline_bytes(w: Workload, pp_rank: int) -> tuple[float, float]:
    """Activations of the microbatches that the schedule keeps at a time, and what is then received
    ahead or sent.

    A stage keeps its output too.
    """
    assert w.pipeline is not None
    hidden = hidden_bytes(w)
    moments = in_flight(w.pipeline, w.microbatches, pp_rank)
    return max(((_moment_bytes(w, m), m.transfers * hidden) for m in moments), key=sum)


def _moment_bytes(w: Workload, moment: InFlight) -> float:
    """Activations that are in flight at a moment."""
    activations = recomputed = transit = 0.0
    for stage, count in moment.microbatches.items():
        per_microbatch, copied = _stage_bytes(w, w.stages[stage])
        activations += count * per_microbatch
        transit = max(transit, copied)
        if postponed := moment.postponed.get(stage, 0):
            blocks = w.counted([w.stages[stage]])
            activations += postponed * _summed(_postponed_bytes, blocks)
            if not w.compiled:
                again = _summed(lambda b: b.recompute.pointwise * _block_bytes(b), blocks)
                recomputed = max(recomputed, RECOMPUTED_COPIES * again)
    return transit + activations + recomputed


@lru_cache(maxsize=64)  # a rank's stages are mostly alike
def _stage_bytes(w: Workload, stage: PlannedStage) -> tuple[float, float]:
    """Bytes of one microbatch that a stage keeps, with its output, and those in transit."""
    blocks = w.counted([stage])
    kept = _summed(_saved_bytes, blocks) - offloaded_bytes(blocks) + hidden_bytes(w)
    return kept, _in_transit_bytes(blocks)


def _summed(per_token: Callable[[Workload], float], blocks: Counted) -> float:
    """Bytes of one microbatch in all blocks of a stage."""
    return sum(count * per_token(block) * block.tokens for block, count in blocks)


def _postponed_bytes(w: Workload) -> float:
    """Bytes per token that a block keeps, beyond what it does anyway, from its backward of inputs
    to that of weights.

    That is the gradient of what each of its parameters gave; a compiled block is one operation,
    which gave its output.
    """
    d = w.dim
    mixing = w.mixing
    heads = (mixing.queries + mixing.keys + mixing.values - mixing.copied) / w.tp
    tp = w.tp
    if w.compiled:
        return w.element * d / tp
    inner = sum(
        (w.expert_rows if x.experts else x.rows) * x.outputs
        for x in w.linears
        if x.name[-2:] in ("w1", "w3")
    )
    returned = w.expert_rows * d if w.experts else d
    return w.element * (heads + d + inner + returned + 2 * d / tp)


def _waiting_losses(w: Workload, pp_rank: int) -> float:
    """What the losses of all microbatches but one keep for their backward: in breadth-first
    schedules, and those that split it.

    A chunked loss keeps gradients of hidden states and output weight, a compiled one logits, an
    eager one log-softmax.
    """
    assert w.pipeline is not None
    last = len(w.stages) - 1
    moments = in_flight(w.pipeline, w.microbatches, pp_rank)
    if w.config.training.loss_chunks > 1:
        most = max(moment.microbatches[last] for moment in moments)
        return (most - 1) * (hidden_bytes(w) + w.element * w.vocab_params)
    # After the backward of the hidden states, the gradient of the logits waits for that of the
    # weight.
    logits = w.tokens * w.vocab / (w.tp if w.sharded_loss else 1)
    loss = w.element if w.loss_compiled else FP32
    bytes_per_logit = 0
    for moment in moments:
        postponed = moment.postponed.get(last, 0)
        waiting = max(0, moment.microbatches[last] - postponed - 1)
        bytes_per_logit = max(bytes_per_logit, waiting * loss + postponed * w.element)
    return logits * bytes_per_logit


def _attention_bytes(w: Workload) -> float:
    """Bytes per token that the backward of a block's mixing needs, but for the block's input."""
    mixing = w.mixing
    heads = mixing.queries + mixing.keys + mixing.values + mixing.out
    per_token = w.element * (heads + mixing.saved + mixing.read) / w.tp
    per_token += _log_sum_exp_bytes(w)
    if w.args.qk_norm and mixing.module == "attention":  # what their norms read
        kv = w.args.n_kv_heads * w.args.head_dim
        per_token += w.element * (mixing.queries + kv) / w.tp
        per_token += FP32 * (w.args.n_heads + w.args.n_kv_heads) / w.tp
    return per_token


def _log_sum_exp_bytes(w: Workload) -> float:
    """Bytes per token that flash attention keeps beside its output: one fp32 number per head."""
    return FP32 * w.mixing.sums / w.tp


def _block_bytes(w: Workload) -> float:
    """Bytes per token that a block's backward needs: inputs of products and norms, q, k, v."""
    d = w.dim
    tp = w.tp
    # what the two norms of a placement read: the residual stream, or what is added to it
    norms = 4 if w.args.norm_placement == "both" else 2
    joining = 5 * d / tp if w.kind.joins else 0  # embedding and state, normalized, joined
    outside = _attention_bytes(w) + w.element * (norms * d / tp + joining)
    if not w.experts:
        f = w.ffn / tp
        inner = 3 if w.args.activation == "relu2" else 4
        return outside + w.element * (d / tp + inner * f)
    # The router reads an fp32 copy. Experts keep their rows, two of their products, and the rows
    # they return. Those that compute in 8 bits also keep what the third reads, and what that is
    # made of.
    results = 4 if experts_in_eight_bits(w.config) else 2
    if w.args.activation == "clamped_swiglu" and not w.compiled:
        results += 5  # biased, clamped, and the gate's sigmoid: as traced
    network = FP32 * d / tp + _routing_bytes(w)
    network += w.element * w.expert_rows * (2 * d + results * w.ffn)
    shared = w.args.shared_expert_dim
    if shared:
        network += w.element * (2 * d + 4 * shared) / tp
    return outside + network


def _routing_bytes(w: Workload) -> float:
    """Bytes per token of its probabilities in fp32 and of what is known about its rows."""
    return FP32 * w.experts / w.tp + ROUTER_BYTES * w.expert_rows


@lru_cache(maxsize=64)
def _saved_bytes(w: Workload) -> float:
    """Bytes per token that a block keeps from its forward to its backward."""
    d = w.dim
    tp = w.tp
    ac = w.config.activation_checkpoint
    boundary = w.element * d / tp
    everything = _block_bytes(w)
    if ac.mode == "full":
        return boundary
    if selects_operations(ac):
        # Every second product, attention, and results summed over ranks. Between the three regions
        # of experts that are apart also what goes from one to the next.
        products = sum(
            (FP32 if x.fp32 else w.element) * x.rows * x.outputs for x in w.linears if x.saved
        )
        saved = boundary + products + w.element * w.mixing.out / tp + _log_sum_exp_bytes(w)
        summed = 1 if w.experts else 2
        saved += w.element * summed * d / tp * (tp > 1)
        if w.experts and w.experts_apart:
            exchanged = 2 if w.ep > 1 else 1  # before the exchange, and after it
            saved += boundary + _routing_bytes(w)
            saved += w.element * d * exchanged * w.expert_rows
        return saved
    if ac.mode == "selective":
        share = 1 / int(ac.selective_ac_option)
        return share * boundary + (1 - share) * everything
    if ac.mode == "memory_budget":
        return boundary + ac.memory_budget * (everything - boundary)
    return everything


def offloaded_per_block(w: Workload) -> float:
    """Bytes of one microbatch that an offloaded block keeps in host memory."""
    # torch keeps results of operations out of the hooks' sight.
    seen = w.compiled or not selects_operations(w.config.activation_checkpoint)
    return w.tokens * (_saved_bytes(w) if seen else w.element * w.dim / w.tp)


def _offloaded(blocks: Counted) -> tuple[int, float]:
    """How many of a stage's blocks are offloaded, and the bytes of one of average size."""
    layers = sum(count for _, count in blocks)
    if not layers:
        return 0, 0.0
    ac = blocks[0][0].config.activation_checkpoint
    mean = sum(count * offloaded_per_block(block) for block, count in blocks) / layers
    return offloaded_blocks(ac, layers), mean


def offloaded_bytes(blocks: Counted) -> float:
    """Bytes of one microbatch that a stage keeps in host memory."""
    count, size = _offloaded(blocks)
    return count * size


def _in_transit_bytes(blocks: Counted) -> float:
    """Bytes of offloaded blocks still on the device: the current one and the one being copied."""
    count, size = _offloaded(blocks)
    return min(2, count) * size


@lru_cache(maxsize=64)
def _working_bytes(w: Workload) -> float:
    """Bytes per token in a block's backward: recomputed, gradients, gathered by collectives.

    The numbers of d, q and f are adjusted: tensors that the compiled and the eager backward hold at
    its peak.
    """
    d = w.dim
    q = w.mixing.queries / w.tp
    f = w.ffn / w.tp
    # gradients of an expert's rows and of its products; and copies before and after the exchange
    if w.experts:
        per_row = (d + 4 * w.ffn) if w.ep > 1 else (d + 2 * w.ffn)
        exchanged = 2 * d * w.expert_rows if w.ep > 1 else 0
        block = _block_bytes(w) + w.element * (w.expert_rows * per_row + exchanged)
    elif w.compiled:
        gathered = (1 if w.async_tp else 2) * d if w.tp > 1 else 0
        block = w.element * (6 * d / w.tp + 2 * d + gathered + 8 * q + 9 * f)
    else:
        # Partial sums, gathered gradients, and the copies that put them in order along the
        # sequence.
        gathered = 8 * d if w.tp > 1 else 0
        block = _block_bytes(w) + w.element * (d / w.tp + 2 * f + gathered)
    # Keys and values of all ranks, and their gradients in fp32.
    sent = w.mixing.keys + w.mixing.values
    ring = sent / w.tp * w.cp * (w.element + FP32) if w.cp > 1 else 0
    return block + ring


def _expert_gradients(w: Workload) -> float:
    """Bytes of the experts' gradients, and of the previous block's while they are reduced.

    In a dense block they are small against the activations.
    """
    if not w.experts:
        return 0.0
    block = w.block_params + w.expert_params * (w.expert_padding - 1)
    return w.element * w.expert_params + (w.reduced * block if w.pipeline is None else 0.0)


def _logits(w: Workload) -> tuple[float, float]:
    """Bytes of logits, loss and their gradients, and of the holes they leave in the allocator."""
    chunks = w.config.training.loss_chunks
    kind = ("compiled" if w.loss_compiled else "eager") + ", sharded" * w.sharded_loss
    logits = w.tokens * w.vocab / (w.tp if w.sharded_loss else 1) / chunks
    more = 4 if w.config.training.z_loss else 0  # fp32 logits, kept for its backward
    weight = CHUNK_GRADIENT_BYTES * w.vocab_params if chunks > 1 else 0
    # Tensor parallelism gathers the whole sequence's hidden states; without async TP the layers'
    # gathers left holes.
    hidden = w.element * w.dim * w.tokens / chunks if w.tp > 1 else 0
    return (
        (LOGIT_BYTES[kind] + more) * logits + weight + hidden,
        LOGIT_HOLE_BYTES[kind] * logits + (0 if w.async_tp else hidden),
    )
