"""Collectives and FLOPs of one rank in a training step."""

from collections import Counter
from dataclasses import dataclass, field

from torchtitan.tools.planner.workload import (
    BACKWARD_ATTENTION,
    BACKWARD_PRODUCTS,
    FP8,
    FP32,
    Workload,
)

INT32 = 4
"""Bytes of a number of rows."""


@dataclass
class Collectives:
    """Calls and bytes of one rank's collectives in a step, by (mesh axis, operation).

    Bytes are those of the larger side: the result of a gather, the input of a reduction.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(
        self,
        axis: str,
        operation: str,
        calls: float,
        size: float,
    ) -> None:
        if calls and size:
            self.calls[axis, operation] += round(calls)
            self.bytes[axis, operation] += round(calls * size)


def tensor_parallel_calls(w: Workload) -> tuple[float, float]:
    """All-gathers and reduce-scatters of one block and microbatch, forward and backward.

    With sequence parallelism each pass has two of each (Korthikanti et al., arXiv:2205.05198).
    Recomputing a block gathers its inputs again; recomputing all of it also scatters its results
    again, and a compiler drops the last of those, which nothing reads.
    """
    if w.experts:  # around attention alone: experts get the tokens of each rank
        return 2 + w.recompute.pointwise, 2 + w.recompute.attention
    return 4 + 2 * w.recompute.pointwise, 4 + (1 if w.compiled else 2) * w.recompute.attention


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
    """Bytes that Ulysses exchanges in a block's forward of one microbatch: queries, keys and values
    on the way to the ranks of their heads, and the output on its way back.
    """
    size = w.element * w.tokens / w.tp
    copies = max(1, w.cp * w.tp // w.args.n_kv_heads)
    return size * (w.q + 2 * copies * w.kv), size * w.q


def collectives(w: Workload, pp_rank: int = 0) -> Collectives:
    """What one rank at place `pp_rank` of the pipeline communicates in a step."""
    out = Collectives()
    stages = w.stages_of(pp_rank)
    layers = sum(stage.layers for stage in stages)
    runs = w.microbatches * w.accumulation
    weights = sum(map(w.params, stages))
    hidden = w.tokens * w.dim
    _add_data_parallel(out, w, layers, weights)
    if w.tp > 1:
        gathers, scatters = tensor_parallel_calls(w)
        out.add(
            "tp",
            "all_gather",
            gathers * layers * runs,
            hidden * (FP8 if w.tensorwise else w.element),
        )
        out.add("tp", "reduce_scatter", scatters * layers * runs, hidden * w.element)
        ends = sum(stage.has_embedding + stage.has_output for stage in stages)
        # One in the forward, the other in the backward.
        for operation in ("all_gather", "reduce_scatter"):
            out.add("tp", operation, ends * runs, hidden * w.element)
    if w.experts and w.ep > 1:
        # Each way twice: to the experts and from them.
        there = exchanges(w) * layers * runs
        back = layers * runs
        out.add("ep", "all_to_all", 2 * (there + back), exchanged_bytes(w))
        out.add("ep", "all_to_all", there, INT32 * w.experts)
    if w.cp > 1:
        passes = 2 + w.recompute.attention
        keys_values = 2 * w.tokens * w.kv_attended / w.tp
        if w.by_heads:
            for size in heads_exchanged(w):
                out.add("cp", "all_to_all", passes * layers * runs, size)
        elif w.config.parallelism.context_parallel_rotate_method == "alltoall":
            out.add(
                "cp", "all_to_all", passes * (w.cp - 1) * layers * runs, keys_values * w.element
            )
            out.add("cp", "all_to_all", w.cp * layers * runs, keys_values * FP32)
        else:
            out.add("cp", "all_gather", passes * layers * runs, keys_values * w.element * w.cp)
            out.add("cp", "reduce_scatter", layers * runs, keys_values * FP32 * w.cp)
    if w.pp > 1:
        last = len(w.stages) - 1
        sends = sum(
            (index < last) + (index > 0)
            for index, stage in enumerate(w.stages)
            if stage.rank == pp_rank
        )
        out.add("pp", "send", sends * runs, hidden / w.tp * w.element)
    return out


def _add_data_parallel(
    out: Collectives,
    w: Workload,
    layers: int,
    weights: int,
) -> None:
    """FSDP's and HSDP's collectives: one group of parameters per block, one for its experts if they
    are on other ranks, and one for embedding, norm and output.
    """
    ends = weights - layers * w.block_params
    padded = w.expert_params * w.expert_padding
    own = w.block_params - w.expert_params + padded * (not w.experts_apart)
    groups = layers + (ends > 0)
    scatters = 1 if w.sums_whole_gradients else w.accumulation
    reduces = 1 if w.replicas_apart else scatters
    reshard = "never" if w.pipeline else w.config.parallelism.fsdp_reshard_after_forward
    # Blocks that were resharded are gathered again for the backward; by default the last one stays
    # gathered.
    regathered = {
        "never": 0,
        "default": max(0, layers - 1),
        "always": layers,
    }[reshard]
    gathers = w.accumulation * (layers + regathered)
    if w.fsdp > 1:
        out.add("fsdp", "all_gather", gathers, own * w.gathered)
        out.add(
            "fsdp",
            "all_gather",
            w.accumulation * (groups - layers) * (1 + (reshard == "always")),
            ends * w.element,
        )
        out.add(
            "fsdp", "reduce_scatter", groups * scatters, (layers * own + ends) / groups * w.reduced
        )
    if w.experts_apart and w.efsdp > 1:
        out.add("efsdp", "all_gather", gathers, padded * w.element)
        out.add("efsdp", "reduce_scatter", layers * scatters, padded * w.reduced)
    if w.dp_replicate > 1:
        out.add(
            "dp_replicate",
            "all_reduce",
            groups * reduces,
            (layers * own + ends) / groups / w.fsdp * w.reduced,
        )
        out.add(
            "dp_replicate",
            "all_reduce",
            layers * reduces * w.experts_apart,
            padded / w.efsdp * w.reduced,
        )


def hardware_flops(w: Workload) -> dict[tuple[str, str], float]:
    """FLOPs of a step on one rank by (kind, dtype): the pipeline's mean, with recomputation."""
    tokens = w.tokens * w.microbatches * w.accumulation / w.pp
    dtype = "float32" if w.element == FP32 else "bfloat16"
    products = [(x, w.args.n_layers) for x in w.linears] + [(w.output, 1)]
    out: dict[tuple[str, str], float] = {}
    for linear, count in products:
        own = "float32" if linear.fp32 else dtype
        key = "matmul", "float8" if linear.eight_bit else own
        flops = (1 + BACKWARD_PRODUCTS + linear.recomputed) * linear.flops * count
        out[key] = out.get(key, 0.0) + flops * tokens
    passes = 1 + BACKWARD_ATTENTION + w.recompute.attention
    out["attention", dtype] = passes * w.attention_flops * w.args.n_layers * tokens
    return out
