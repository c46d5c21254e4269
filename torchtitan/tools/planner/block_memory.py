"""Bytes per token that one block keeps for its backward, and needs in it.

State and kept activations follow from the code to the byte; the working set was adjusted by hand
(`memory.py`).
"""

from functools import lru_cache

from torchtitan.config.derive import selects_operations
from torchtitan.tools.planner.linears import experts_in_eight_bits
from torchtitan.tools.planner.workload import FP32, Workload

ROUTER_SAVED_BYTES_PER_ROW = 70
"""Bytes per row of an expert for its place in both orders, weight and expert, on its way there and
back. As traced.
"""


def block_bytes(w: Workload) -> float:
    """Bytes per token that a block's backward needs: inputs of products and norms, q, k, v."""
    d = w.dim
    tp = w.tp
    # inputs of a placement's two norms: the residual stream, or what is added to it
    norms = 4 if w.args.norm_placement == "both" else 2
    join_inputs = 5 * d / tp if w.kind.joins else 0  # embedding and state, normalized, joined
    outside = _attention_bytes(w) + w.element * (norms * d / tp + join_inputs)
    if not w.experts:
        f = w.ffn / tp
        inner = 3 if w.args.activation == "relu2" else 4
        return outside + w.element * (d / tp + inner * f)
    # The router reads an fp32 copy. Experts keep their rows, two of their products, and the rows
    # they return. In 8 bits they also keep the third product's input, and the tensors that it is
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


def _attention_bytes(w: Workload) -> float:
    """Bytes per token that the backward of a block's mixing needs, except the block's input."""
    mixing = w.mixing
    heads = mixing.queries + mixing.keys + mixing.values + mixing.out
    per_token = w.element * (heads + mixing.extra_elements + mixing.input_elements) / w.tp
    per_token += _log_sum_exp_bytes(w)
    if w.args.qk_norm and mixing.module == "attention":  # inputs of their norms
        kv = w.args.n_kv_heads * w.args.head_dim
        per_token += w.element * (mixing.queries + kv) / w.tp
        per_token += FP32 * (w.args.n_heads + w.args.n_kv_heads) / w.tp
    return per_token


def _log_sum_exp_bytes(w: Workload) -> float:
    """Bytes per token that flash attention keeps beside its output: one fp32 number per head."""
    return FP32 * w.mixing.sums / w.tp


def _routing_bytes(w: Workload) -> float:
    """Bytes per token of probabilities in fp32, and of the rows' places, weights and experts."""
    return FP32 * w.experts / w.tp + ROUTER_SAVED_BYTES_PER_ROW * w.expert_rows


@lru_cache(maxsize=64)
def saved_bytes(w: Workload) -> float:
    """Bytes per token that a block keeps from its forward to its backward."""
    d = w.dim
    tp = w.tp
    ac = w.config.activation_checkpoint
    boundary = w.element * d / tp
    everything = block_bytes(w)
    if ac.mode == "full":
        return boundary
    if selects_operations(ac):
        # Every second product, attention, and results summed over ranks. Between the three regions
        # of experts that are apart also what goes from one to the next.
        products = sum(
            (FP32 if x.fp32 else w.element) * x.rows * x.outputs
            for x in w.linears
            if x.keeps_result
        )
        total = boundary + products + w.element * w.mixing.out / tp + _log_sum_exp_bytes(w)
        reductions = 1 if w.experts else 2
        total += w.element * reductions * d / tp * (tp > 1)
        if w.experts and w.experts_apart:
            exchanges = 2 if w.ep > 1 else 1  # before the exchange, and after it
            total += boundary + _routing_bytes(w)
            total += w.element * d * exchanges * w.expert_rows
        return total
    if ac.mode == "selective":
        share = 1 / int(ac.selective_ac_option)
        return share * boundary + (1 - share) * everything
    if ac.mode == "memory_budget":
        return boundary + ac.memory_budget * (everything - boundary)
    return everything


def offloaded_per_block(w: Workload) -> float:
    """Bytes of one microbatch that an offloaded block keeps in host memory."""
    # torch keeps results of operations out of the hooks' sight.
    hooks_see_all = w.compiled or not selects_operations(w.config.activation_checkpoint)
    return w.tokens * (saved_bytes(w) if hooks_see_all else w.element * w.dim / w.tp)


def postponed_bytes(w: Workload) -> float:
    """Bytes per token that a block keeps between its backwards of inputs and of weights, and not
    otherwise.

    These are gradients of the results of its parameters; a compiled block is one operation, whose
    result is its output.
    """
    d = w.dim
    mixing = w.mixing
    heads = (mixing.queries + mixing.keys + mixing.values - mixing.copy_width) / w.tp
    tp = w.tp
    if w.compiled:
        return w.element * d / tp
    inner_products = sum(
        (w.expert_rows if x.experts else x.rows) * x.outputs
        for x in w.linears
        if x.name[-2:] in ("w1", "w3")
    )
    output = w.expert_rows * d if w.experts else d
    return w.element * (heads + d + inner_products + output + 2 * d / tp)


@lru_cache(maxsize=64)
def working_bytes(w: Workload) -> float:
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
        exchange_copies = 2 * d * w.expert_rows if w.ep > 1 else 0
        block = block_bytes(w) + w.element * (w.expert_rows * per_row + exchange_copies)
    elif w.compiled:
        gathers = (1 if w.async_tp else 2) * d if w.tp > 1 else 0
        block = w.element * (6 * d / w.tp + 2 * d + gathers + 8 * q + 9 * f)
    else:
        # Partial sums, gathered gradients, and the copies that put them in order along the
        # sequence.
        gathers = 8 * d if w.tp > 1 else 0
        block = block_bytes(w) + w.element * (d / w.tp + 2 * f + gathers)
    # Keys and values of all ranks, and their gradients in fp32.
    keys_values = w.mixing.keys + w.mixing.values
    ring = keys_values / w.tp * w.cp * (w.element + FP32) if w.cp > 1 else 0
    return block + ring


def expert_gradients(w: Workload) -> float:
    """Bytes of the experts' gradients, and of the previous block's while they are reduced.

    In a dense block they are small against the activations.
    """
    if not w.experts:
        return 0.0
    block = w.block_params + w.expert_params * (w.expert_padding - 1)
    return w.element * w.expert_params + (w.reduced_bytes * block if w.pipeline is None else 0.0)
