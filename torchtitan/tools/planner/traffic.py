"""Collectives and FLOPs of one rank in a training step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan.tools.planner.memory import Counted, hidden_bytes
from torchtitan.tools.planner.workload import FP8, FP32, Workload

BACKWARD_PRODUCTS = 2
"""Matrix products in the backward per product in the forward: the gradients of its input and of its
weight.
"""
INT32 = 4
"""Bytes of a number of rows."""


@dataclass
class Collectives:
    """Calls and bytes of one rank's collectives in a step, by (mesh axis, operation).

    Bytes are those of the larger side: the result of a gather, the input of a reduction.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, axis: str, operation: str, calls: float, size: float) -> None:
        if calls and size:
            self.calls[axis, operation] += round(calls)
            self.bytes[axis, operation] += round(calls * size)


def tensor_parallel_widths(w: Workload) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """All-gathers and reduce-scatters of one block and microbatch, forward and backward: the widths
    of what they move, with how many there are of each.

    With sequence parallelism each pass has two of each (Korthikanti et al., arXiv:2205.05198): what
    is gathered in the forward is scattered in the backward. The backward gathers inputs again,
    whether it recomputes them or kept their shards; recomputing all of a block also scatters its
    results again, and a compiler drops the last of those, which nothing reads. Routed experts get
    the tokens of each rank.
    """
    d = w.dim
    networks = 0 if w.experts else 1
    networks += w.experts > 0 and w.args.shared_expert_dim > 0
    results = 1 + networks
    dropped = 1 if w.compiled and not w.experts else 0
    scattered = [*w.mixing.gathered, *[d] * networks]
    gathers = [(width, 2.0) for width in scattered] + [(d, float(results))]
    scatters = [(width, 1.0) for width in scattered]
    scatters.append((d, results + (results - dropped) * w.recompute.attention))
    return gathers, scatters


def exchanges(w: Workload) -> float:
    """Times that the forward of a block's experts exchanges rows, recomputation included.

    Selection by operation saves what is exchanged, and a compiler's budget doesn't reach it.
    """
    if w.config.activation_checkpoint.mode in ("full", "selective"):
        return 1 + w.recompute.attention
    return 1


def exchanged_bytes(w: Workload) -> float:
    """Bytes of the rows that a rank sends to the experts, or gets back, for one microbatch."""
    return w.element * w.tokens * w.expert_rows * w.dim


def heads_exchanged(w: Workload) -> tuple[float, float]:
    """Bytes that a block exchanges in the forward of one microbatch if context parallelism gives
    each rank whole rows of some heads: what heads read, on the way to their ranks, and their output
    on its way back.
    """
    size = w.element * w.tokens / w.tp
    mixing = w.mixing
    read = mixing.queries + mixing.keys + mixing.values + mixing.gates
    if mixing.module == "attention":
        copies = max(1, w.cp * w.tp // w.args.n_kv_heads)
        read = mixing.queries + copies * (mixing.keys + mixing.values)
    return size * read, size * mixing.out


def collectives(w: Workload, pp_rank: int = 0) -> Collectives:
    """The collectives of a step on one rank of pipeline rank `pp_rank`."""
    out = Collectives()
    stages = w.stages_of(pp_rank)
    blocks = w.counted(stages)
    runs = w.microbatches * w.accumulation
    hidden = w.tokens * w.dim
    _add_data_parallel(out, w, blocks, [n for stage in stages for n in w.ends(stage)])
    for block, count in blocks:
        _add_block(out, block, count * runs)
    if w.tp > 1:
        ends = sum(stage.has_embedding + stage.has_output for stage in stages)
        # One in the forward, the other in the backward.
        for operation in ("all_gather", "reduce_scatter"):
            out.add("tp", operation, ends * runs, hidden * w.element)
    if w.pp > 1:
        last = len(w.stages) - 1
        sends = sum(
            (index < last) + (index > 0)
            for index, stage in enumerate(w.stages)
            if stage.rank == pp_rank
        )
        out.add("pp", "send", sends * runs, hidden_bytes(w))
    return out


def _add_block(out: Collectives, w: Workload, times: int) -> None:
    """Add what one block communicates each time it runs, without its weights."""
    if w.tp > 1:
        gathers, scatters = tensor_parallel_widths(w)
        gathered = FP8 if w.tensorwise else w.element
        for width, calls in gathers:
            out.add("tp", "all_gather", calls * times, w.tokens * width * gathered)
        for width, calls in scatters:
            out.add("tp", "reduce_scatter", calls * times, w.tokens * width * w.element)
    if w.experts and w.ep > 1:
        # Each way twice: to the experts and from them.
        there = exchanges(w) * times
        out.add("ep", "all_to_all", 2 * (there + times), exchanged_bytes(w))
        out.add("ep", "all_to_all", there, INT32 * w.experts)
    if w.cp > 1:
        passes = 2 + w.recompute.attention
        keys_values = w.tokens * (w.mixing.keys + w.mixing.values) / w.tp
        if w.by_heads:
            for size in heads_exchanged(w):
                out.add("cp", "all_to_all", passes * times, size)
        elif w.config.parallelism.context_parallel_rotate_method == "alltoall":
            out.add("cp", "all_to_all", passes * (w.cp - 1) * times, keys_values * w.element)
            out.add("cp", "all_to_all", w.cp * times, keys_values * FP32)
        else:
            out.add("cp", "all_gather", passes * times, keys_values * w.element * w.cp)
            out.add("cp", "reduce_scatter", times, keys_values * FP32 * w.cp)


def _add_data_parallel(
    out: Collectives, w: Workload, blocks: Counted, units: Sequence[int]
) -> None:
    """FSDP's and HSDP's collectives: one group of parameters per block, one for its experts if they
    are on other ranks, and those at the ends of the model.

    Args:
        units: `Workload.ends` of all stages.
    """
    layers = sum(count for _, count in blocks)
    ends = sum(units)
    block_weights = sum(count * _gathered_with(block) for block, count in blocks)
    groups = layers + len(units)
    scatters = 1 if w.sums_whole_gradients else w.accumulation
    reduces = 1 if w.replicas_apart else scatters
    reshard = "never" if w.pipeline else w.config.parallelism.fsdp_reshard_after_forward
    # Blocks that were resharded are gathered again for the backward; by default the last one stays
    # gathered.
    regathered = {"never": 0, "default": max(0, layers - 1), "always": layers}[reshard]
    gathers = w.accumulation * (layers + regathered)
    stays = _gathered_with(blocks[-1][0]) if 0 < regathered < layers else 0.0
    twice = block_weights - stays if regathered else 0.0
    if w.fsdp > 1:
        size = w.accumulation * (block_weights + twice) / max(gathers, 1)
        out.add("fsdp", "all_gather", gathers, size * w.gathered)
        out.add(
            "fsdp", "all_gather", w.accumulation * len(units), ends / max(len(units), 1) * w.element
        )
        out.add(
            "fsdp", "reduce_scatter", groups * scatters, (block_weights + ends) / groups * w.reduced
        )
    if w.dp_replicate > 1:
        size = (block_weights + ends) / groups / w.fsdp * w.reduced
        out.add("dp_replicate", "all_reduce", groups * reduces, size)
    for block, count in blocks:
        if not block.experts_apart:
            continue
        padded = block.expert_params * block.expert_padding
        share = count / layers
        if w.efsdp > 1:
            out.add("efsdp", "all_gather", gathers * share, padded * w.element)
            out.add("efsdp", "reduce_scatter", count * scatters, padded * w.reduced)
        if w.dp_replicate > 1:
            out.add("dp_replicate", "all_reduce", count * reduces, padded / w.efsdp * w.reduced)


def _gathered_with(w: Workload) -> float:
    """Parameters that FSDP gathers with a block: all but experts that are apart."""
    padded = w.expert_params * w.expert_padding
    return w.block_params - w.expert_params + padded * (not w.experts_apart)


def hardware_flops(w: Workload) -> dict[tuple[str, str], float]:
    """FLOPs of a step on one rank by (kind, dtype): the pipeline's mean, with recomputation."""
    tokens = w.tokens * w.microbatches * w.accumulation / w.pp
    dtype = "float32" if w.element == FP32 else "bfloat16"
    blocks = w.counted(w.stages)
    products = [(x, count) for block, count in blocks for x in block.linears]
    out: dict[tuple[str, str], float] = {}
    for linear, count in [*products, (w.output, w.predictions)]:
        layer_dtype = "float32" if linear.fp32 else dtype
        key = "matmul", "float8" if linear.eight_bit else layer_dtype
        flops = (1 + BACKWARD_PRODUCTS + linear.recomputed) * linear.flops * count
        out[key] = out.get(key, 0.0) + flops * tokens
    for block, count in blocks:
        passes = 1 + block.mixing.backward + w.recompute.attention
        key = ("matmul", "float32") if block.mixing.module == "delta" else ("attention", dtype)
        out[key] = out.get(key, 0.0) + passes * block.attention_flops * count * tokens
    return out
