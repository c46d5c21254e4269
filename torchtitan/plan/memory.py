"""Peak memory in closed form, by part: what the allocator reserves on each pipeline rank.

Memory of FSDP's communication streams is not shared with that of the compute stream (the caching allocator keeps a pool
for each), so parts that peak at different times still add up. `tools.plan` traces its answers; these formulas are for
the thousands of layouts that a search looks at.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.plan.schedule import program
from torchtitan.plan.workload import Workload

PARTS = ("parameters", "gradients", "optimizer", "activations", "unsharded", "logits", "communication", "other")
_LIBRARIES = 0.5 * 2**30
"""What every run has on top: workspaces of matrix products, rotary tables, small tensors."""


@dataclass(frozen=True)
class Memory:
    """One pipeline rank's peak."""

    parts: Mapping[str, float]
    """Bytes by part, `PARTS`."""

    @property
    def reserved(self) -> float:
        return sum(self.parts.values())


def predict_memory(w: Workload) -> Memory:
    """Of the rank that needs most."""
    return max((memory_of(w, rank) for rank in range(w.pp)), key=lambda memory: memory.reserved)


def memory_of(w: Workload, pp_rank: int) -> Memory:
    """Peak of one rank, with all its stages."""
    stages = w.of_rank(pp_rank)
    t, optimizer = w.config.training, w.config.optimizer
    total = sum(map(w.params, stages))
    matrices = sum(stage.layers * (w.block_params - 2 * w.dim) for stage in stages)
    moments = 4 * total - 2 * matrices if optimizer.name == "Muon" else 4 * total
    ends = sum(w.params(stage) - stage.layers * w.block_params for stage in stages)
    layers = sum(stage.layers for stage in stages)
    shard = 0.0 if t.enable_cpu_offload else 1 / w.fsdp
    gathered = 1 if w.narrow_gather else w.width
    kept = _kept_bytes(w) * w.tokens
    parts = dict.fromkeys(PARTS, 0.0)
    parts["parameters"] = w.stored * total * shard
    parts["optimizer"] = (2 if optimizer.state_dtype == "float32" else 1) * moments * shard
    parts["gradients"] = 0.0 if optimizer.early_step_in_backward else 4 * total * shard
    parts["other"] = _LIBRARIES
    projects = any(stage.projects for stage in stages)
    working = _working_bytes(w) * w.tokens
    logits, hole = _logit_bytes(w) if projects else (0.0, 0.0)
    if w.pipeline is None:
        parts["activations"] = kept * layers + max(0.0, working - logits)
        blocks = layers if w.config.parallelism.fsdp_reshard_after_forward == "never" else min(2, layers)
        parts["unsharded"] = w.width * ends + gathered * blocks * w.block_params
        if w.fsdp > 1:
            # Copies into and out of the gathers of two groups, and the reduced gradients of one block.
            parts["communication"] = w.width * ends + 1.5 * gathered * w.block_params + 4 * w.block_params / w.fsdp
        if w.accumulation > 1:  # gradients are added up before they are reduced
            parts["unsharded"] += 4 * total
    else:
        boundary = w.width * w.tokens * w.dim / w.tp  # a stage keeps its output too
        size = {stage: kept * w.stages[stage].layers + boundary for stage in w.pipeline.stages_of(pp_rank)}
        numbers = program(w.pipeline, w.microbatches).kept[pp_rank]
        alive = max(sum(count * size[stage] for stage, count in number.items()) for number in numbers)
        parts["activations"] = alive + max(0.0, working - logits)
        received = 2 * w.microbatches * w.width * w.tokens * w.dim / w.tp * len(stages)
        parts["communication"] = received + 4 * w.block_params * (w.fsdp > 1)
        if w.compiled:  # the published runs held more than their tensors: forwards and backwards in turns leave holes
            parts["communication"] += (2 * gathered + 8) * w.block_params * (w.fsdp > 1)
            hole += working / 2
        parts["unsharded"] = gathered * layers * w.block_params + w.width * ends
        parts["unsharded"] += 4 * total  # gradients, added up over the microbatches in fp32
    parts["logits"], parts["other"] = logits, parts["other"] + hole
    return Memory(parts)


def _block_bytes(w: Workload) -> float:
    """All that the backward of a block needs of a token: inputs of products and norms, q, k, v, log-sum-exp."""
    d, q, f, tp = w.dim, w.q / w.tp, w.ffn / w.tp, w.tp
    return w.width * (2 * d / tp + 2 * d + 2 * q + 2 * w.kv_sent / tp + 4 * f) + 4 * w.args.n_heads / tp


def _kept_bytes(w: Workload) -> float:
    """What a block keeps of a token from its forward to its backward."""
    d, q, kv, f, tp = w.dim, w.q / w.tp, w.kv / w.tp, w.ffn / w.tp, w.tp
    ac = w.config.activation_checkpoint
    attention, everything = 4 * w.args.n_heads / tp, _block_bytes(w)
    boundary = w.width * d / tp
    if ac.mode == "full":
        return boundary
    if ac.mode == "selective" and ac.selective_ac_option == "op":
        # Every second product: wq, wv, w1 and w2, whose result is not yet summed over the ranks; attention; the sums.
        # Nothing needs w2's: a compiler drops it.
        whole = 0 if w.compiled else d
        return boundary + w.width * (q + kv + f + whole + q + (2 * d / tp if tp > 1 else 0)) + attention
    if ac.mode == "selective":
        share = 1 / int(ac.selective_ac_option)
        return share * boundary + (1 - share) * everything
    if ac.mode == "memory_budget":
        return boundary + ac.memory_budget * (everything - boundary)
    return everything


def _working_bytes(w: Workload) -> float:
    """Of a token, while a block's backward runs: what it computes again, gradients, and what collectives gather."""
    d, q, f = w.dim, w.q / w.tp, w.ffn / w.tp
    if w.compiled:
        gathered = (1 if w.async_tp else 2) * d if w.tp > 1 else 0
        own = w.width * (6 * d / w.tp + 2 * d + gathered + 8 * q + 9 * f)
    else:
        # Partial sums, gathered gradients, and the copies that put them in order along the sequence.
        gathered = 8 * d if w.tp > 1 else 0
        own = _block_bytes(w) + w.width * (d / w.tp + 2 * f + gathered)
    # Keys and values of all ranks, and their gradients in fp32.
    ring = 2 * w.kv_sent / w.tp * w.cp * (w.width + 4) if w.cp > 1 else 0
    return own + ring


def _logit_bytes(w: Workload) -> tuple[float, float]:
    """Of logits and loss with their gradients, and of the hole that the bf16 logits leave in the allocator's pool."""
    chunks = w.config.training.loss_chunks
    count = w.tokens * w.vocab / (w.tp if w.sharded_loss else 1) / chunks
    # bf16 logits, in fp32, softmax and gradient; vocabulary-sharded losses make one more copy. Compiled: in and out.
    each = 4 if w.loss_compiled else 12 if not w.sharded_loss else 16
    hole = 0 if w.loss_compiled else 2 if not w.sharded_loss else 4
    weight = (4 + 2 + 2) * w.vocab_params if chunks > 1 else 0  # its gradient: sum, of one slice, and in the end
    # The hidden states of all ranks' parts of the sequence; without async TP the layers' gathers have left holes.
    gathered = w.width * w.dim * w.tokens / chunks if w.tp > 1 else 0
    return each * count + weight + gathered, hole * count + (0 if w.async_tp else gathered)
