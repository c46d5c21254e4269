"""Seconds of communication: a block's collectives, the pipeline's transfers, FSDP, and offload.

Bytes over bandwidth, less what the compute beside it hides. The formulas are listed in
`docs/internals/plan.md`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchtitan.config.derive import offloaded_blocks
from torchtitan.models.costs import FP32
from torchtitan.parallel.kinds import Stage
from torchtitan.parallel.record import FP8
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.workload import Workload

HOST_WAIT = 100e-6
"""Seconds without work for the device while the host waits for the number of rows from each rank: a
copy to the host, and the launch of what follows. Estimate.
"""


def tensor_parallel(
    w: Workload, hw: Hardware, products: tuple[float, float]
) -> tuple[float, float]:
    """Exposed seconds of one block's tensor-parallel collectives, forward and backward."""
    if w.tp == 1:
        return 0.0, 0.0
    share = w.tokens * (w.tp - 1) / w.tp / hw.bandwidth(w.tp, 1)
    gathers, scatters = w.tensor_widths
    # Eager collectives copy what they gather or scatter along the sequence of several rows.
    has_several_rows = w.tokens * w.cp > w.seq_len
    copy_seconds = 2 * w.tokens / hw.bytes_per_s if has_several_rows and not w.compiled else 0.0
    gather = share * (FP8 if w.tensorwise else w.element) + copy_seconds * w.element
    scatter = (share + copy_seconds) * w.element
    # In the forward each input is gathered and each result scattered once.
    forward = sum(width * gather + hw.collective for width, _ in gathers[:-1])
    forward += w.tensor_results * (w.dim * scatter + hw.collective)
    total = sum(calls * (width * gather + hw.collective) for width, calls in gathers)
    total += sum(calls * (width * scatter + hw.collective) for width, calls in scatters)
    backward = total - forward
    if w.async_tp:  # transfers hide behind the products beside them
        forward -= hw.async_tp * min(forward, products[0])
        backward -= hw.async_tp * min(backward, products[1])
    return forward, backward


def context_parallel(w: Workload, hw: Hardware, attention: float) -> tuple[float, float]:
    """Exposed seconds of a block's context parallelism (Liu et al., arXiv:2310.01889).

    In a ring keys and values travel to every rank, and their gradients back in fp32. Ulysses
    exchanges heads, and nothing overlaps that.
    """
    if w.cp == 1:
        return 0.0, 0.0
    if w.by_heads:
        size = sum(w.heads_exchanged) * (w.cp - 1) / w.cp
        once = size / hw.bandwidth(w.cp, w.tp) + 2 * hw.collective
        return once, once * (1 + w.recompute.attention)
    elements = w.tokens * (w.heads.keys + w.heads.values) / w.tp * (w.cp - 1)
    bandwidth = hw.bandwidth(w.cp, w.tp)
    keys_values = elements * w.element / bandwidth
    gradients = elements * FP32 / bandwidth
    if w.config.parallelism.context_parallel_rotate_method == "alltoall":
        # Each transfer hides behind attention to the keys that arrived before it; the last
        # gradients have none left.
        exposed = max(0.0, keys_values - attention)
        gradients = max(gradients / (w.cp - 1), gradients - w.heads.backward * attention)
    else:
        # A gather hides behind attention to the rank's own keys.
        exposed = max(0.0, keys_values - attention / w.cp)
    return exposed, exposed * (1 + w.recompute.attention) + gradients


def expert_rows(w: Workload, hw: Hardware, shared: tuple[float, float]) -> tuple[float, float]:
    """Seconds that a block's rows travel, forward and backward, less the way to the experts that
    the products of the shared expert hide.

    Args:
        shared: seconds of those products, forward and backward.
    """
    if w.ep == 1:
        return 0.0, 0.0
    if (there := w.fused_exchange(hw)) is not None:
        return there, w.exchanges * there
    rows = hw.exchange(w.exchanged_bytes, w.ep)
    there, back = (rows + max(0.0, rows - products) for products in shared)
    return there, back + (w.exchanges - 1) * there


def expert_counts(w: Workload, hw: Hardware) -> tuple[float, float]:
    """Seconds to exchange the row counts of a block's experts, forward and backward."""
    if w.ep == 1 or w.fused_exchange(hw) is not None:
        return 0.0, 0.0
    once = hw.exchange(0.0, w.ep) + HOST_WAIT
    return once, (w.exchanges - 1) * once


def transfer(w: Workload, hw: Hardware) -> float:
    """Seconds to send a microbatch's hidden states to the next stage."""
    return w.hidden_bytes / hw.bandwidth(2, stride=w.world // w.pp) + hw.collective


def gather_and_reduce(w: Workload, hw: Hardware) -> tuple[float, float, float]:
    """Seconds to gather a block's weights, reduce-scatter its gradients and all-reduce them.

    A ring over n ranks moves (n - 1) / n of the data; an all-reduce does it twice (Patarasuk and
    Yuan, doi:10.1016/j.jpdc.2008.09.002).
    """
    gather = scatter = reduce = 0.0
    for params, ranks, stride, element_bytes in w.units:
        if ranks > 1:
            bandwidth = hw.bandwidth(ranks, stride)
            share = (ranks - 1) / ranks
            gather += params * element_bytes * share / bandwidth + hw.collective
            scatter += params * w.reduced_bytes * share / bandwidth + hw.collective
        if w.dp_replicate > 1:
            replicas = w.dp_replicate
            bandwidth = hw.bandwidth(replicas, w.tp * w.fsdp)
            reduce += 2 * w.reduced_bytes * params / ranks * (replicas - 1) / replicas / bandwidth
    return gather, scatter, reduce


def data_parallel(
    w: Workload, hw: Hardware, times: Sequence[tuple[float, float]], stage: Stage
) -> dict[str, float]:
    """FSDP's communication that compute doesn't hide, and the compute that it slows down.

    Blocks are gathered one ahead and reduced one behind (Zhao et al., arXiv:2304.11277), so a block
    exposes the time that its neighbour's compute, a block of its kind, is too short to hide. So
    does the output. Nothing hides the first or the last unit: one block and the embeddings, or all
    ends in one unit.

    Args:
        times: seconds of one block and microbatch of each kind, forward and backward.
    """
    exposed = hidden = 0.0
    layers = max(1, stage.layers)
    for block, (forward, backward), count in zip(w.blocks, times, stage.kinds, strict=True):
        if count:
            sizes = [size / block.block_params for size in w.ends(stage)]
            first = sizes.pop(0) if stage.has_embedding else 0.0
            ends = first, sum(sizes)
            overlap = _overlap(block, hw, forward, backward, layers=count, ends=ends)
            # Work before the first block and after the last one is counted for each kind.
            exposed += overlap.exposed_in_blocks + overlap.exposed_at_ends * count / layers
            hidden += overlap.hidden
    out = {"communication: dp": exposed}
    if w.fsdp * w.dp_replicate > 1:
        out["slowed by communication"] = hw.overlap_slowdown * hidden
    if not w.weights_in_place and (w.copied_bytes or not w.stays_whole):
        out["FSDP's copies"] = _copied_bytes(w, stage.rank) / hw.bytes_per_s
    if w.config.training.enable_cpu_offload:
        # Per batch two gathers read from the host; gradients are written to it.
        batches = w.accumulation
        shard = sum(map(w.shard, w.stages_of(stage.rank)))
        writes = 1 if w.sums_whole_gradients else batches
        out["host memory"] = shard * (w.stored_bytes * 2 * batches + FP32 * writes) / hw.host_link
    return out


def _copied_bytes(w: Workload, pp_rank: int) -> float:
    """Bytes that FSDP moves beside compute in a step: what it gathered, out of its buffer, forward
    and backward; and gradients, into the buffer that it reduces. Without it: casts of the weights,
    and of gradients, whose sum is read after the first batch.
    """
    params = sum(map(w.params, w.stages_of(pp_rank)))
    if w.copied_bytes:
        cast = w.stored_bytes + w.element
        return params * (cast * (1 + w.accumulation) + w.stored_bytes * (w.accumulation - 1))
    gathered = w.accumulation * (1 + w.regathers) * 2 * w.gathered_bytes
    reductions = 1 if w.sums_whole_gradients else w.accumulation
    return params * (gathered + reductions * (w.element + w.reduced_bytes))


class _Overlap(NamedTuple):
    """Seconds of the communication of blocks of one kind."""

    exposed_in_blocks: float
    """Not hidden by the compute of blocks."""
    exposed_at_ends: float
    """Of the ends, and of the first block."""
    hidden: float


def _overlap(
    w: Workload,
    hw: Hardware,
    forward: float,
    backward: float,
    layers: int,
    ends: tuple[float, float],
) -> _Overlap:
    """
    Args:
        forward, backward: seconds of one block and microbatch.
        layers: number of blocks.
        ends: units before the first block and after the last one, in blocks.
    """
    first, last = ends
    gather, scatter, all_reduce = gather_and_reduce(w, hw)
    reduce = scatter + all_reduce
    batches = w.accumulation
    in_forward = layers * max(0.0, gather - forward)
    at_ends = gather * (1 + first) + max(0.0, gather * last - forward)
    if w.pipeline is not None:
        # Gathered once per batch, beside its first microbatch; reduced beside its last.
        exposed_in_blocks = in_forward + layers * max(0.0, reduce - backward)
        return _Overlap(exposed_in_blocks * batches, (at_ends + reduce) * batches, 0.0)
    regather = gather if w.regathers else 0.0
    early_reduction = scatter if w.replicas_apart else reduce
    if w.sums_whole_gradients:
        early_reduction = 0.0
    exposed_in_blocks = in_forward * batches
    exposed_at_ends = at_ends * batches
    hidden = layers * batches * (min(gather, forward) + min(regather, backward))
    for count, reduction in (batches - 1, early_reduction), (1, reduce):
        # The first block's gradients and the embeddings' have no compute left to hide in.
        exposed_in_blocks += count * layers * max(0.0, regather + reduction - backward)
        exposed_at_ends += count * reduction * (1 + first)
        hidden += count * layers * min(reduction, backward)
    return _Overlap(exposed_in_blocks, exposed_at_ends, hidden)


def activation_offload(
    w: Workload, hw: Hardware, times: Sequence[tuple[float, float]], pp_rank: int
) -> float:
    """Seconds of copies to and from the host that the compute of a block is too short to hide."""
    ac = w.config.activation_checkpoint
    total = 0.0
    for stage in w.stages_of(pp_rank):
        share = offloaded_blocks(ac, stage.layers) / max(1, stage.layers)
        for block, (forward, backward), count in zip(w.blocks, times, stage.kinds, strict=True):
            copy = block.offloaded_per_block / hw.host_link
            exposed = max(0.0, copy - forward) + max(0.0, copy - backward)
            total += share * count * exposed
    return total * w.microbatches * w.accumulation
