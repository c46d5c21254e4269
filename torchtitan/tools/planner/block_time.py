"""Seconds of one block, and of the model's two ends, for one microbatch.

Compute is a roofline for each class of operation: the larger of FLOPs over a sustained rate and
bytes over a sustained bandwidth. The constants state their sources: "counted" is by hand from
the code of a block, checked only as part of the whole against
`benchmarks/published/published.csv`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchtitan.models.costs import FP32
from torchtitan.optim.loss import CHUNK_MOVED_BYTES, FORWARD_SHARE, MOVED_BYTES
from torchtitan.parallel.record import FP8, Linear
from torchtitan.tools.planner.comm_time import (
    context_parallel,
    expert_counts,
    expert_rows,
    tensor_parallel,
)
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.workload import Workload

BACKWARD_POINTWISE = 2
"""Bytes that the backward of pointwise operations moves per byte of their forward. Counted."""
EMBEDDING_PASSES = 3
"""Passes over the embedding's activations: written and read, and their gradient read. Estimate."""
CAST_INPUT_BYTES = 4
RECAST_INPUT_BYTES = 3
CAST_GRADIENT_BYTES = 5
"""Bytes moved per element rounded to 8 bits: read for its scale (2), read (2) and written (1);
weights, too. That fusion saves 1 byte of an input in the forward, and 2 when the backward rounds it
again, is an estimate.
"""
SCALINGS_ROWWISE = 2
"""A rowwise recipe rounds each operand by rows and by columns; a tensorwise one rounds it once."""
EXPERT_TILE = 128
"""Rows that a grouped product computes at a time. Of each expert's last tile half is empty on
average. The tile of CUTLASS's kernels for Hopper.
"""
LAUNCHES = "launches by the host"

COMPILED_LAUNCH = 0.4
REGION_LAUNCHES = 10
FSDP_LAUNCHES = 20
HOST_DOUBT = 0.25
"""In launches of an eager operation: one of compiled code, which has no autograd and little Python;
the call of a compiled region; and FSDP's hooks for a group of parameters in one direction. And how
far a launch may be off, as a standard deviation. Estimates.
"""


@dataclass(frozen=True)
class Pass:
    """Seconds of one block, or of the model's two ends, for one microbatch."""

    by_cause: Mapping[str, tuple[float, float]]
    """Forward and backward of `matrix products`, `attention`, `pointwise`, `8-bit casts`, `head and
    loss`, `communication: AXIS`, and `launches by the host`, beyond the device's seconds of
    the others.
    """
    weights: float
    """Seconds of the backward that a schedule can postpone: the weights' gradients."""
    host_doubt: float = 0.0
    """Seconds more if each launch lasts `HOST_DOUBT` longer."""

    @property
    def forward(self) -> float:
        return sum(forward for forward, _ in self.by_cause.values())

    @property
    def backward(self) -> float:
        return sum(backward for _, backward in self.by_cause.values())


def block_time(w: Workload, hw: Hardware) -> Pass:
    """One block."""
    products = {x: _products(w, hw, x) for x in w.linears}
    forward = sum(layer.forward for layer in products.values())
    weights = sum(layer.weight for layer in products.values())
    backward = sum(
        layer.backward + layer.forward * x.recompute_share for x, layer in products.items()
    )

    rate = (hw.fp32 if hw.device == "cpu" else _peak(w, hw)) * hw.attention
    if w.attends_by_cudnn:
        rate *= hw.attention_cudnn
    if not w.heads.kv_heads:  # products in fp32
        rate = hw.fp32 * hw.gemm_bf16
    attention = w.attention_flops * w.tokens / rate
    if not w.by_heads:  # a ring's other ranks hold all but 1 / cp of the keys
        attention *= 1 / w.cp + (1 - 1 / w.cp) / hw.ring_attention

    pointwise = w.tokens * w.moved_bytes * (1.0 if w.compiled else hw.eager) / hw.bytes_per_s
    casts = _casts(w, hw)
    tensor = tensor_parallel(w, hw, (forward, backward))
    context = context_parallel(w, hw, attention)
    shared_expert = [layer for x, layer in products.items() if x.name.startswith("moe.shared")]
    hiding = (
        sum(layer.forward for layer in shared_expert),
        sum(layer.backward for layer in shared_expert),
    )
    rows = expert_rows(w, hw, hiding)
    counts = expert_counts(w, hw)
    attention_repeats = w.heads.backward / hw.attention_backward + w.recompute.attention
    by_cause = {
        "matrix products": (forward, backward),
        "attention": (attention, attention * attention_repeats),
        "pointwise": (pointwise, pointwise * (BACKWARD_POINTWISE + w.recompute.pointwise)),
        "8-bit casts": casts,
        "communication: tp": tensor,
        "communication: cp": context,
    }
    exchanges = rows[0] + counts[0], rows[1] + counts[1]
    device = Pass(by_cause, weights)
    if w.overlaps_experts:
        exchanges = _excess(exchanges, device)
    by_cause["communication: ep"] = exchanges
    host = host_seconds(w, hw)
    late = _excess(host, device)
    later = _excess((host[0] * (1 + HOST_DOUBT), host[1] * (1 + HOST_DOUBT)), device)
    return Pass(by_cause | {LAUNCHES: late}, weights, host_doubt=sum(later) - sum(late))


def _excess(seconds: tuple[float, float], device: Pass) -> tuple[float, float]:
    """Seconds beyond the device's, which hide them, forward and backward."""
    return max(0.0, seconds[0] - device.forward), max(0.0, seconds[1] - device.backward)


def host_seconds(w: Workload, hw: Hardware) -> tuple[float, float]:
    """Seconds in which the host launches a block's kernels, forward and backward."""
    if hw.device == "cpu":
        return 0.0, 0.0
    compiled = w.compiled and not w.launches_alone
    forward, backward = w.launches[2:] if compiled else w.launches[:2]
    backward += w.recompute.pointwise * forward
    groups = 1 + w.experts_apart
    if compiled:
        regions = 3 if w.experts_apart else 1
        forward, backward = (
            COMPILED_LAUNCH * count + REGION_LAUNCHES * regions for count in (forward, backward)
        )
    hooks = FSDP_LAUNCHES * groups
    return hw.host_launch * (forward + hooks), hw.host_launch * (backward + hooks)


def _casts(w: Workload, hw: Hardware) -> tuple[float, float]:
    """Seconds to round a block's 8-bit operands: inputs and weights, then gradients, and inputs and
    weights again. FSDP may gather the weights of dense layers in 8 bits.
    """
    eight_bit = [x for x in w.linears if x.eight_bit]
    gathered = w.gathered_bytes == FP8
    rounded = [] if w.weights_in_place else eight_bit
    weights = CAST_GRADIENT_BYTES * sum(x.params for x in rounded if x.experts or not gathered)
    # wq, wk and wv share an input, and so do w1 and w3.
    inputs: dict[str, float] = {}
    outputs = 0.0
    for x in eight_bit:
        separate = x.name[-2:] in ("wo", "w2") or x.name.endswith(("wq_b", "wkv_b", "out_proj"))
        source = x.name if separate else x.name.rpartition(".")[0]
        elements = x.rows * (1 if w.tensorwise and not x.experts else SCALINGS_ROWWISE)
        inputs[source] = x.inputs * elements
        outputs += x.outputs * elements
    per_byte = (1.0 if w.compiled else hw.eager) / hw.bytes_per_s
    elements_read = w.tokens * sum(inputs.values())
    forward = (CAST_INPUT_BYTES * elements_read + weights) * per_byte
    backward = CAST_GRADIENT_BYTES * w.tokens * outputs + RECAST_INPUT_BYTES * elements_read
    backward = (backward + weights) * per_byte
    recompute = forward * sum(x.recompute_share for x in eight_bit) / max(1, len(eight_bit))
    return forward, backward + recompute


def ends_time(w: Workload, hw: Hardware) -> Pass:
    """Embedding, output projection and loss, all counted with the stage of the output."""
    product = _products(w, hw, w.output)
    per_logit = MOVED_BYTES["compiled" if w.loss_compiled else "eager"]
    loss = (per_logit * w.vocab * w.tokens / w.tp + chunk_sum_bytes(w, hw)) / hw.bytes_per_s
    embedding = EMBEDDING_PASSES * w.element * w.tokens * w.dim / w.tp / hw.bytes_per_s
    forward = w.predictions * (product.forward + loss * FORWARD_SHARE)
    backward = w.predictions * (product.backward + loss * (1 - FORWARD_SHARE) + embedding)
    return Pass({"head and loss": (forward, backward)}, w.predictions * product.weight)


def chunk_sum_bytes(w: Workload, hw: Hardware) -> float:
    """Bytes moved for the sum of the output projection's gradient over the chunks of a loss."""
    beside = w.tp > 1 or w.output.eight_bit or hw.device == "cpu"
    moved = CHUNK_MOVED_BYTES["beside them" if beside else "in products"] * w.vocab_params
    chunks = w.config.training.loss_chunks
    return chunks * moved if chunks > 1 else 0.0


# ---- matrix products


def _peak(w: Workload, hw: Hardware) -> float:
    """Data-sheet FLOP/s in the type that computes."""
    return hw.fp32 if w.element == FP32 else hw.bf16


@dataclass(frozen=True)
class _Products:
    """Seconds of a linear layer's three matrix products."""

    forward: float
    inputs: float
    """Gradient of the input."""
    weight: float
    """Gradient of the weight."""

    @property
    def backward(self) -> float:
        return self.inputs + self.weight


def _products(w: Workload, hw: Hardware, linear: Linear) -> _Products:
    """The three products of a linear layer, which sum over different sizes."""
    rate = _peak(w, hw) * hw.gemm_bf16
    operand = w.element
    tokens = w.tokens * linear.rows
    if linear.fp32:
        rate = hw.fp32 * hw.gemm_bf16
        operand = FP32
    if linear.eight_bit:
        rowwise = linear.experts or not (w.tensorwise or w.mx)
        rate = hw.fp8 * (hw.gemm_fp8_rowwise if rowwise else hw.gemm_fp8) or hw.bf16 * hw.gemm_bf16
        operand = FP8
    products = max(1, linear.experts)
    if linear.experts:
        rate *= hw.gemm_grouped / (1 + EXPERT_TILE / 2 / (tokens / products))
    # The sizes of one product of a group: rows, columns, and the size that is summed over.
    m = tokens / products
    n = linear.outputs
    k = linear.inputs

    def seconds(rows: float, columns: float, inner: float, traffic: float) -> float:
        computed = hw.product_seconds(rows, columns, inner, rate, products)
        return max(computed, products * traffic / hw.bytes_per_s)

    input_bytes = operand * m * k
    weight_bytes = operand * k * n
    output_bytes = w.element * m * n
    forward = seconds(m, n, k, input_bytes + weight_bytes + output_bytes)
    if linear.fp32 and hw.device != "cpu" and not w.gates_in_fp32:
        forward = _products(w, hw, replace(linear, fp32=False)).forward
    return _Products(
        forward,
        seconds(m, k, n, operand * m * n + weight_bytes + w.element * m * k),
        seconds(k, n, m, operand * m * n + input_bytes + w.element * k * n),
    )
