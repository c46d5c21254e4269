"""What communication costs: the seconds of a block's collectives, of a pipeline's transfers, and of
FSDP's.

Bytes over the bandwidth of a ring, less what the compute beside it hides. Only FSDP's are whole:
`costs.py` compares them with the compute of a step. `docs/guides/plan.md` lists the formulas.
"""

from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.traffic import exchanged_bytes, exchanges, tensor_parallel_calls
from torchtitan.tools.planner.workload import BACKWARD_ATTENTION, FP8, FP32, Workload

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
    share = w.tokens * w.dim * (w.tp - 1) / w.tp / hw.bandwidth(w.tp, 1)
    gather = share * (FP8 if w.tensorwise else w.element) + hw.tp_sync
    scatter = share * w.element + hw.tp_sync
    gathers, scatters = tensor_parallel_calls(w)
    once = 1 if w.experts else 2
    forward = once * (gather + scatter)
    backward = (gathers - once) * gather + (scatters - once) * scatter
    if w.async_tp:  # what is sent hides behind the products beside it
        forward -= hw.async_tp * min(forward, products[0])
        backward -= hw.async_tp * min(backward, products[1])
    return forward, backward


def context_parallel(w: Workload, hw: Hardware, attention: float) -> tuple[float, float]:
    """Exposed seconds of one block's context parallelism, forward and backward (Liu et al.,
    arXiv:2310.01889).

    Keys and values travel to every rank, and their gradients back in fp32.
    """
    if w.cp == 1:
        return 0.0, 0.0
    elements = 2 * w.tokens * w.kv_attended / w.tp * (w.cp - 1)
    bandwidth = hw.bandwidth(w.cp, w.tp)
    keys_values = elements * w.element / bandwidth
    gradients = elements * FP32 / bandwidth
    if w.config.parallelism.context_parallel_rotate_method == "alltoall":
        # Each transfer hides behind attention to the keys that arrived before it; the last
        # gradients have none left.
        exposed = max(0.0, keys_values - attention)
        gradients = max(gradients / (w.cp - 1), gradients - BACKWARD_ATTENTION * attention)
    else:
        exposed = max(
            0.0, keys_values - attention / w.cp
        )  # a gather hides behind attention to the rank's own keys
    return exposed, exposed * (1 + w.recompute.attention) + gradients


def expert_parallel(w: Workload, hw: Hardware) -> tuple[float, float]:
    """Seconds to exchange one block's rows, forward and backward: nothing else can run
    meanwhile.
    """
    if w.ep == 1:
        return 0.0, 0.0
    rows = hw.exchange(exchanged_bytes(w), w.ep)
    there = (
        2 * rows + hw.exchange(0.0, w.ep) + HOST_WAIT
    )  # the rows go and come; before that, their number
    return there, 2 * rows + (exchanges(w) - 1) * there


def transfer(w: Workload, hw: Hardware) -> float:
    """Seconds to send a microbatch's hidden states to the next stage."""
    size = w.element * w.tokens * w.dim / w.tp
    return size / hw.bandwidth(2, stride=w.world // w.pp) + hw.launch


def gather_and_reduce(w: Workload, hw: Hardware) -> tuple[float, float, float]:
    """Seconds to gather one block's weights, to reduce-scatter its gradients, and to all-reduce
    them over replicas.

    A ring over n ranks moves (n - 1) / n of the data; an all-reduce does it twice (Patarasuk and
    Yuan, doi:10.1016/j.jpdc.2008.09.002).
    """
    gather = scatter = reduce = 0.0
    padded = w.expert_params * w.expert_padding
    own = w.block_params - w.expert_params
    units = [(own + padded * (not w.experts_apart), w.fsdp, w.tp, w.gathered)]
    if w.experts_apart:
        units.append((padded, w.efsdp, w.ep, w.element))
    for params, ranks, stride, gathered in units:
        if ranks > 1:
            bandwidth = hw.bandwidth(ranks, stride)
            share = (ranks - 1) / ranks
            latency = hw.latency * (ranks - 1) if ranks * stride > hw.gpus_per_node else hw.launch
            gather += params * gathered * share / bandwidth + latency
            scatter += params * w.reduced * share / bandwidth + latency
        if w.dp_replicate > 1:
            bandwidth = hw.bandwidth(w.dp_replicate, w.tp * w.fsdp)
            reduce += (
                2 * w.reduced * params / ranks * (w.dp_replicate - 1) / w.dp_replicate / bandwidth
            )
    return gather, scatter, reduce
