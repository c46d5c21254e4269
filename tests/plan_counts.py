"""FLOPs and collectives of a step by the planner's formulas, to compare with traces."""

from collections import Counter
from dataclasses import dataclass, field

from torchtitan.models.costs import FP32
from torchtitan.parallel.record import FP8
from torchtitan.tools.planner.workload import Workload

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


def collectives(w: Workload, pp_rank: int = 0) -> Collectives:
    """The collectives of a step on one rank of pipeline rank `pp_rank`, but for FSDP's."""
    out = Collectives()
    stages = w.stages_of(pp_rank)
    blocks = w.block_counts(stages)
    runs = w.microbatches * w.accumulation
    hidden = w.tokens * w.dim
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
        out.add("pp", "send", sends * runs, w.hidden_bytes)
    return out


def _add_block(out: Collectives, w: Workload, times: int) -> None:
    """Add what one block communicates each time it runs, without its weights."""
    if w.tp > 1:
        gathers, scatters = w.tensor_widths
        gathered = FP8 if w.tensorwise else w.element
        for width, calls in gathers:
            out.add("tp", "all_gather", calls * times, w.tokens * width * gathered)
        for width, calls in scatters:
            out.add("tp", "reduce_scatter", calls * times, w.tokens * width * w.element)
    if w.experts and w.ep > 1:
        # Each way twice: to the experts and from them.
        there = w.exchanges * times
        out.add("ep", "all_to_all", 2 * (there + times), w.exchanged_bytes)
        out.add("ep", "all_to_all", there, INT32 * w.experts)
    if w.cp > 1:
        passes = 2 + w.recompute.attention
        keys_values = w.tokens * (w.heads.keys + w.heads.values) / w.tp
        if w.by_heads:
            for size in w.heads_exchanged:
                out.add("cp", "all_to_all", passes * times, size)
        elif w.config.parallelism.context_parallel_rotate_method == "alltoall":
            out.add("cp", "all_to_all", passes * (w.cp - 1) * times, keys_values * w.element)
            out.add("cp", "all_to_all", w.cp * times, keys_values * FP32)
        else:
            out.add("cp", "all_gather", passes * times, keys_values * w.element * w.cp)
            out.add("cp", "reduce_scatter", times, keys_values * FP32 * w.cp)


def hardware_flops(w: Workload) -> dict[tuple[str, str], float]:
    """FLOPs of a step on one rank by (kind, dtype): the pipeline's mean, with recomputation."""
    tokens = w.tokens * w.microbatches * w.accumulation / w.pp
    dtype = "float32" if w.element == FP32 else "bfloat16"
    blocks = w.block_counts(w.stages)
    products = [(x, count) for block, count in blocks for x in block.linears]
    out: dict[tuple[str, str], float] = {}
    for linear, count in [*products, (w.output, w.predictions)]:
        layer_dtype = "float32" if linear.fp32 else dtype
        key = "matmul", "float8" if linear.eight_bit else layer_dtype
        flops = (1 + BACKWARD_PRODUCTS + linear.recompute_share) * linear.flops * count
        out[key] = out.get(key, 0.0) + flops * tokens
    for block, count in blocks:
        passes = 1 + block.heads.backward + w.recompute.attention
        key = ("matmul", "float32") if not block.heads.kv_heads else ("attention", dtype)
        out[key] = out.get(key, 0.0) + passes * block.attention_flops * count * tokens
    return out
