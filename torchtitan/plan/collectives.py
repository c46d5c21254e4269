"""The collectives that one rank issues in a training step: how many, and how many bytes, by mesh axis."""

from collections import Counter
from dataclasses import dataclass, field

from torchtitan.plan.workload import FP8, FP32, Workload


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


def tensor_parallel_calls(w: Workload) -> tuple[float, float]:
    """All-gathers and reduce-scatters of one block and microbatch, forward and backward.

    With sequence parallelism each pass has two of each (Korthikanti et al., arXiv:2205.05198). Recomputing a block
    gathers its inputs again; recomputing all of it also scatters its results again, and a compiler drops the last of
    those, which nothing reads.
    """
    return 4 + 2 * w.recompute.pointwise, 4 + (1 if w.compiled else 2) * w.recompute.attention


def collectives(w: Workload, pp_rank: int = 0) -> Collectives:
    """What one rank at place `pp_rank` of the pipeline communicates in a step."""
    out = Collectives()
    stages = w.stages_of(pp_rank)
    layers, runs = sum(stage.layers for stage in stages), w.microbatches * w.accumulation
    weights = sum(map(w.params, stages))
    hidden = w.tokens * w.dim
    _add_data_parallel(out, w, layers, weights)
    if w.tp > 1:
        gathers, scatters = tensor_parallel_calls(w)
        out.add("tp", "all_gather", gathers * layers * runs, hidden * (FP8 if w.tensorwise else w.element))
        out.add("tp", "reduce_scatter", scatters * layers * runs, hidden * w.element)
        ends = sum(stage.has_embedding + stage.has_output for stage in stages)
        for operation in ("all_gather", "reduce_scatter"):  # one in the forward, the other in the backward
            out.add("tp", operation, ends * runs, hidden * w.element)
    if w.cp > 1:
        passes, keys_values = 2 + w.recompute.attention, 2 * w.tokens * w.kv_attended / w.tp
        if w.config.parallelism.context_parallel_rotate_method == "alltoall":
            out.add("cp", "all_to_all", passes * (w.cp - 1) * layers * runs, keys_values * w.element)
            out.add("cp", "all_to_all", w.cp * layers * runs, keys_values * FP32)
        else:
            out.add("cp", "all_gather", passes * layers * runs, keys_values * w.element * w.cp)
            out.add("cp", "reduce_scatter", layers * runs, keys_values * FP32 * w.cp)
    if w.pp > 1:
        last = len(w.stages) - 1
        sends = sum((index < last) + (index > 0) for index, stage in enumerate(w.stages) if stage.rank == pp_rank)
        out.add("pp", "send", sends * runs, hidden / w.tp * w.element)
    return out


def _add_data_parallel(out: Collectives, w: Workload, layers: int, weights: int) -> None:
    """FSDP's and HSDP's collectives: one group of parameters per block, and one for embedding, norm and output."""
    ends = weights - layers * w.block_params
    groups = layers + (ends > 0)
    scatters = 1 if w.sums_whole_gradients else w.accumulation
    reduces = 1 if w.replicas_apart else scatters
    if w.fsdp > 1:
        reshard = "never" if w.pipeline else w.config.parallelism.fsdp_reshard_after_forward
        # Blocks that were resharded are gathered again for the backward; by default the last one stays gathered.
        regathered = {"never": 0, "default": max(0, layers - 1), "always": layers}[reshard]
        out.add("fsdp", "all_gather", w.accumulation * (layers + regathered), w.block_params * w.gathered)
        out.add(
            "fsdp", "all_gather", w.accumulation * (groups - layers) * (1 + (reshard == "always")), ends * w.element
        )
        out.add("fsdp", "reduce_scatter", groups * scatters, weights / groups * w.reduced)
    if w.dp_replicate > 1:
        out.add("dp_replicate", "all_reduce", groups * reduces, weights / groups / w.fsdp * w.reduced)
