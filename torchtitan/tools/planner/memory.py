"""Peak memory in closed form, by part: what the allocator reserves on each pipeline rank.

The caching allocator keeps a pool for each stream, and FSDP's streams can't use what the compute
stream has freed, so parts that peak at different times still add up. A plan's answer is traced
(`trace.py`); these formulas are for the thousands of layouts that a search visits.

State and kept activations follow from the code to the byte (tests hold them to autograd). The
working set of a block, and what is held beyond the tensors, were adjusted by hand until eager runs
met traces, and compiled pipelines the published runs
(`python benchmarks/published/plan_accuracy.py --trace repo paper`); constants from
there are marked "adjusted".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.config.derive import offloaded_blocks
from torchtitan.tools.planner.pipeline_timeline import Held, program
from torchtitan.tools.planner.workload import BYTES, FP32, Stage, Workload

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

TRACED_BATCHES = 3
"""Batches of an accumulated step that a trace runs: the first, one in the middle, and the last."""
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
LOGIT_BYTES = {
    "compiled": 4,
    "compiled, sharded": 10,
    "eager": 12,
    "eager, sharded": 16,
}
"""Bytes per logit at the peak. Compiled: bf16 logits and their gradient; sharding the vocabulary
ends inductor's kernel at each all-reduce, with two copies in fp32 beside the logits. Eager: bf16
logits, fp32 logits, softmax and gradient less what is freed by then; sharding the vocabulary keeps
one more copy in fp32. As traced.
"""
LOGIT_HOLE_BYTES = {
    "compiled": 0,
    "compiled, sharded": 0,
    "eager": 2,
    "eager, sharded": 4,
}
"""Bytes per logit that the allocator holds and nothing fits into. Adjusted."""
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
    parts = dict.fromkeys(PARTS, 0.0) | _state(w, stages)
    total = sum(map(w.params, stages))
    layers = sum(stage.layers for stage in stages)
    ends = w.element * (total - layers * w.block_params)  # embedding, last norm, output projection
    has_output = any(stage.has_output for stage in stages)
    logits, hole = _logits(w) if has_output else (0.0, 0.0)
    working = (_working_bytes(w) * w.tokens + _expert_gradients(w)) * (layers > 0)
    parts["logits"], parts["other"] = logits, LIBRARY_BYTES + hole
    if w.pipeline is None:
        kept = _kept_bytes(w) * w.tokens * layers
        kept = kept - _offloaded_bytes(w, layers) + _in_transit_bytes(w, layers)
        parts["activations"] = kept + max(0.0, working - logits)
        never = w.config.parallelism.fsdp_reshard_after_forward == "never"
        blocks = layers if never else min(PREFETCHED_BLOCKS, layers)
        parts["unsharded"] = ends + w.gathered * blocks * w.block_params
        if w.fsdp > 1 or w.experts_apart:
            own = w.block_params - w.expert_params
            padded = w.expert_params * w.expert_padding
            reduced = w.reduced * (own / w.fsdp + padded / w.efsdp)
            parts["communication"] = ends + GATHER_COPIES * w.gathered * (own + padded) + reduced
        if w.sums_whole_gradients and parts["gradients"] < FP32 * total:
            parts["unsharded"] += FP32 * total
        elif w.accumulation > 1 and w.replicas_apart and not parts["gradients"]:
            parts["communication"] += FP32 * sum(map(w.shard, stages))
        return Memory(parts)
    kept, transfers = in_flight(w, pp_rank)
    parts["activations"] = kept + max(0.0, working - logits)
    if has_output:
        parts["logits"] += _waiting_losses(w, pp_rank)
    # Gradients are summed over the microbatches before they are reduced.
    parts["unsharded"] = w.gathered * layers * w.block_params + ends + FP32 * total
    parts["communication"] = transfers + FP32 * w.block_params * (w.fsdp > 1 and layers > 0)
    if w.compiled and layers:
        held = COMPILED_PIPELINE_BUFFERS * (w.gathered + FP32) * w.block_params
        parts["communication"] += held * (w.fsdp > 1)
        parts["other"] += working * COMPILED_PIPELINE_HOLES
    return Memory(parts)


def _state(w: Workload, stages: list[Stage]) -> dict[str, float]:
    """Parameters, gradients and optimizer state of a rank's shard, with the weight average."""
    optimizer = w.config.optimizer
    on_device = not w.config.training.enable_cpu_offload
    shard = sum(map(w.shard, stages)) * on_device
    moments = 2 * shard
    if optimizer.name == "Muon":  # one moment for a block's matrices, AdamW's two for the rest
        matrices = sum(
            x.params / (w.efsdp / w.expert_padding if x.experts else w.fsdp) for x in w.linears
        )
        moments -= sum(stage.layers for stage in stages) * matrices * on_device
    return {
        "parameters": w.stored * shard,
        "gradients": 0.0 if optimizer.early_step_in_backward else FP32 * shard,
        "optimizer": BYTES[optimizer.state_dtype] * moments + FP32 * shard * w.config.ema.enable,
    }


def hidden_bytes(w: Workload) -> float:
    """Bytes of a microbatch's hidden states between blocks, split by tensor parallelism."""
    return w.element * w.tokens * w.dim / w.tp


def in_flight(w: Workload, pp_rank: int) -> tuple[float, float]:
    """Activations of the microbatches that the schedule keeps at a time, and what is then received
    ahead or sent.

    A stage keeps its output too.
    """
    assert w.pipeline is not None
    kept = _kept_bytes(w) * w.tokens
    hidden = hidden_bytes(w)
    own = w.pipeline.stages_of(pp_rank)
    layers = {stage: w.stages[stage].layers for stage in own}
    size = {
        stage: kept * layers[stage] - _offloaded_bytes(w, layers[stage]) + hidden for stage in own
    }
    transit = max(_in_transit_bytes(w, count) for count in layers.values())
    waiting = _postponed_bytes(w) * w.tokens
    again = 0.0
    if not w.compiled:
        again = RECOMPUTED_COPIES * w.recompute.pointwise * _block_bytes(w) * w.tokens

    def activations(held: Held) -> float:
        kept = sum(count * size[stage] for stage, count in held.microbatches.items())
        postponed = sum(count * layers[stage] * waiting for stage, count in held.postponed.items())
        recomputed = max((layers[stage] * again for stage in held.postponed), default=0.0)
        return transit + kept + postponed + recomputed

    moments = program(w.pipeline, w.microbatches).held[pp_rank]
    return max(((activations(held), held.transfers * hidden) for held in moments), key=sum)


def _postponed_bytes(w: Workload) -> float:
    """Bytes per token that a block keeps, beyond what it does anyway, from its backward of inputs
    to that of weights.

    That is the gradient of what each of its parameters gave; a compiled block is one operation,
    which gave its output.
    """
    d = w.dim
    q = w.q / w.tp
    kv = w.kv / w.tp
    f = w.ffn
    tp = w.tp
    if w.compiled:
        return w.element * d / tp
    network = w.expert_rows * (2 * f + d) if w.experts else 2 * f / tp + d
    return w.element * (q + 2 * kv + d + network + 2 * d / tp)


def _waiting_losses(w: Workload, pp_rank: int) -> float:
    """What the losses of all microbatches but one keep for their backward: in breadth-first
    schedules, and those that split it.

    A chunked loss keeps gradients of hidden states and output weight, a compiled one logits, an
    eager one log-softmax.
    """
    assert w.pipeline is not None
    last = len(w.stages) - 1
    moments = program(w.pipeline, w.microbatches).held[pp_rank]
    if w.config.training.loss_chunks > 1:
        most = max(held.microbatches[last] for held in moments)
        return (most - 1) * (hidden_bytes(w) + w.element * w.vocab_params)
    # After the backward of the hidden states, the gradient of the logits waits for that of the
    # weight.
    logits = w.tokens * w.vocab / (w.tp if w.sharded_loss else 1)
    loss = w.element if w.loss_compiled else FP32
    most = 0
    for held in moments:
        postponed = held.postponed.get(last, 0)
        waiting = max(0, held.microbatches[last] - postponed - 1)
        most = max(most, waiting * loss + postponed * w.element)
    return logits * most


def _log_sum_exp_bytes(w: Workload) -> float:
    """What flash attention keeps per token beside its output: one fp32 number per head."""
    return FP32 * w.args.n_heads / w.tp


def _block_bytes(w: Workload) -> float:
    """Bytes per token that a block's backward needs: inputs of products and norms, q, k, v."""
    d = w.dim
    q = w.q / w.tp
    f = w.ffn / w.tp
    tp = w.tp
    attention = w.element * (2 * q + 2 * w.kv_attended / tp) + _log_sum_exp_bytes(w)
    if getattr(w.args, "qk_norm", False):  # what the norms of heads read
        attention += w.element * (q + w.kv / tp) + FP32 * (w.args.n_heads + w.args.n_kv_heads) / tp
    if not w.experts:
        return w.element * (2 * d / tp + 2 * d + 4 * f) + attention
    # The router reads an fp32 copy. Experts keep their rows, two of their products, and the rows
    # they return. Those that compute in 8 bits also keep what the third reads, and what that is
    # made of.
    inner = (4 if w.eight_bit_experts else 2) * w.ffn
    network = FP32 * d / tp + _routing_bytes(w) + w.element * w.expert_rows * (2 * d + inner)
    return w.element * (2 * d / tp + d) + attention + network


def _routing_bytes(w: Workload) -> float:
    """Bytes per token of its probabilities in fp32 and of what is known about its rows."""
    return FP32 * w.experts / w.tp + ROUTER_BYTES * w.expert_rows


def _kept_bytes(w: Workload) -> float:
    """Bytes per token that a block keeps from its forward to its backward."""
    d = w.dim
    q = w.q / w.tp
    kv = w.kv / w.tp
    f = w.ffn / w.tp
    tp = w.tp
    ac = w.config.activation_checkpoint
    boundary = w.element * d / tp
    everything = _block_bytes(w)
    if ac.mode == "full":
        return boundary
    if w.checkpoints_operations() and w.experts:
        # Of the block's products wq, wv, the router's, and w3; or, if it is in three regions, what
        # goes from one to the next, and w1 and w2.
        width = w.ffn
        if w.experts_apart:
            width = 3 * d + w.ffn + (0 if w.compiled else d)
        rows = w.element * w.expert_rows * width
        regions = (boundary + _routing_bytes(w)) * w.experts_apart
        sums = w.element * d / tp if tp > 1 else 0
        attention = w.element * (2 * q + kv) + _log_sum_exp_bytes(w) + sums
        return boundary + attention + FP32 * w.experts / tp + rows + regions
    if w.checkpoints_operations():
        # Every second product: wq, wv, w1 and w2, whose result is not yet summed over the ranks;
        # attention; the sums. No gradient needs w2's: a compiler drops it.
        w2 = 0 if w.compiled else d
        sums = 2 * d / tp if tp > 1 else 0
        return boundary + w.element * (q + kv + f + w2 + q + sums) + _log_sum_exp_bytes(w)
    if ac.mode == "selective":
        share = 1 / int(ac.selective_ac_option)
        return share * boundary + (1 - share) * everything
    if ac.mode == "memory_budget":
        return boundary + ac.memory_budget * (everything - boundary)
    return everything


def offloaded_per_block(w: Workload) -> float:
    """Bytes of one microbatch that an offloaded block keeps in host memory."""
    # torch keeps results of operations out of the hooks' sight.
    seen = w.compiled or not w.checkpoints_operations()
    return w.tokens * (_kept_bytes(w) if seen else w.element * w.dim / w.tp)


def _offloaded_bytes(w: Workload, layers: int) -> float:
    """What a stage of `layers` blocks keeps of one microbatch in host memory."""
    return offloaded_per_block(w) * offloaded_blocks(w.config.activation_checkpoint, layers)


def _in_transit_bytes(w: Workload, layers: int) -> float:
    """Bytes of offloaded blocks still on the device: the current one and the one being copied."""
    return offloaded_per_block(w) * min(2, offloaded_blocks(w.config.activation_checkpoint, layers))


def _working_bytes(w: Workload) -> float:
    """Bytes per token in a block's backward: recomputed, gradients, gathered by collectives.

    The numbers of d, q and f are adjusted: tensors that the compiled and the eager backward hold at
    its peak.
    """
    d = w.dim
    q = w.q / w.tp
    f = w.ffn / w.tp
    # gradients of an expert's rows and of its products; and copies before and after the exchange
    if w.experts:
        rows = (3 * d + 4 * w.ffn) if w.ep > 1 else (d + 2 * w.ffn)
        block = _block_bytes(w) + w.element * w.expert_rows * rows
    elif w.compiled:
        gathered = (1 if w.async_tp else 2) * d if w.tp > 1 else 0
        block = w.element * (6 * d / w.tp + 2 * d + gathered + 8 * q + 9 * f)
    else:
        # Partial sums, gathered gradients, and the copies that put them in order along the
        # sequence.
        gathered = 8 * d if w.tp > 1 else 0
        block = _block_bytes(w) + w.element * (d / w.tp + 2 * f + gathered)
    # Keys and values of all ranks, and their gradients in fp32.
    ring = 2 * w.kv_attended / w.tp * w.cp * (w.element + FP32) if w.cp > 1 else 0
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
