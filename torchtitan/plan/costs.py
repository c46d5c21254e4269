"""The performance model: seconds of one training step, by what they are spent on.

Compute is a roofline for each class of operation: the larger of FLOPs over a sustained rate and bytes over a sustained
bandwidth. Communication is bytes over the bandwidth of its ring, less what hides behind compute. A pipeline's bubble
comes from running its schedule (`schedule.py`). Formulas and their sources are in `docs/plan.md`.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torchtitan.plan.hardware import Hardware
from torchtitan.plan.schedule import Timeline, program, simulate
from torchtitan.plan.workload import Linear, Stage, Workload

Seconds = dict[str, float]
"""By part: `matrix products`, `attention`, `pointwise`, `8-bit casts`, `head and loss`, and `communication: AXIS`."""


@dataclass(frozen=True)
class StepTime:
    """One training step."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds of the slowest rank by what they are spent on; they add up to `seconds`."""
    timeline: Timeline | None
    """Of a pipeline, without the steps before and after it."""
    bubble: float
    """Share of the step in which the mean rank waits for the pipeline."""
    tokens_per_second: float
    """Of one GPU."""


@dataclass(frozen=True)
class _Block:
    """Seconds of one block, or of the head, for one microbatch."""

    forward: Seconds
    backward: Seconds
    weights: float
    """Part of the backward that a schedule can postpone: the weights' gradients."""

    @property
    def both(self) -> Iterator[tuple[str, float]]:
        return itertools.chain(self.forward.items(), self.backward.items())


@dataclass
class Collectives:
    """Bytes of a step's collectives on one rank, and the number of calls."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, axis: str, operation: str, calls: float, size: float) -> None:
        if calls and size:
            self.calls[axis, operation] += round(calls)
            self.bytes[axis, operation] += round(calls * size)


def step_time(w: Workload, hw: Hardware) -> StepTime:
    """Time of one step of `w` on `hw`."""
    block, head = _block(w, hw), _head(w, hw)
    parts: defaultdict[str, float] = defaultdict(float)
    timeline, idle, worst = None, 0.0, 0
    if w.pipeline is not None:
        timeline = simulate(program(w.pipeline, w.microbatches), _durations(w, block, head), _transfer(w, hw))
        worst = max(range(w.pp), key=timeline.busy.__getitem__)
        idle = timeline.idle * timeline.length * w.accumulation
    for stage in w.of_rank(worst):
        for count, work in (stage.layers, block), (stage.projects, head):
            for part, seconds in work.both:
                parts[part] += count * seconds * w.microbatches * w.accumulation
    if timeline is not None:
        parts["pipeline bubble"] = timeline.length * w.accumulation - sum(parts.values())
    parts |= _exposed(w, hw, block, max(w.of_rank(worst), key=lambda stage: stage.layers))
    parts["optimizer"] = _optimizer(w, hw)
    parts["host"] = hw.step_overhead
    nodes = math.ceil(w.world / hw.gpus_per_node)
    parts["waiting for the slowest node"] = sum(parts.values()) * hw.node_variation * math.log2(nodes)
    seconds = sum(parts.values())
    ordered = {part: parts[part] for part in sorted(parts, key=lambda part: -parts[part]) if parts[part] > 0}
    return StepTime(seconds, ordered, timeline, idle / seconds, w.tokens_per_step / seconds / w.world)


def _product(w: Workload, hw: Hardware, linear: Linear, tokens: float) -> float:
    """Seconds of one matrix product of `tokens` rows."""
    if linear.narrow:
        rate = hw.fp8 * (hw.gemm_fp8 if w.tensorwise or w.mx else hw.gemm_fp8_rowwise)
        rate = rate or hw.bf16 * hw.gemm_bf16
    else:
        rate = hw.fp32 * hw.gemm_bf16 if w.width == 4 else hw.bf16 * hw.gemm_bf16
    narrow = 1 if linear.narrow else w.width
    moved = narrow * (tokens * linear.inputs + linear.inputs * linear.outputs) + w.width * tokens * linear.outputs
    return max(tokens * linear.flops / rate, moved / hw.bytes_per_s)


def _block(w: Workload, hw: Hardware) -> _Block:
    """A block, for one microbatch."""
    f: Seconds = {}
    b: Seconds = {}
    products = {x: _product(w, hw, x, w.tokens) for x in w.linears}
    forward = sum(products.values())
    again = sum(seconds * x.again for x, seconds in products.items())
    f["matrix products"], b["matrix products"] = forward, 2 * forward + again

    # Causal, so half of the square: 2 S q per token. The ring's other ranks have all but 1 / cp of it.
    rate = (hw.fp32 if w.width == 4 else hw.bf16) * hw.attention
    attention = 2.0 * w.seq_len * w.q / w.tp * w.tokens / rate
    attention *= 1 / w.cp + (1 - 1 / w.cp) / hw.ring_attention
    f["attention"] = attention
    b["attention"] = attention * (2.5 / hw.attention_backward + w.attention_again)

    # Norms 4 d, residuals 5 d, rotation, activation: reads and writes of compiled blocks.
    moved = w.width * w.tokens / w.tp * (9 * w.dim + 4 * w.q + 4 * w.kv + 3 * w.ffn)
    pointwise = moved * (1.0 if w.compiled else hw.eager) / hw.bytes_per_s
    f["pointwise"], b["pointwise"] = pointwise, pointwise * (2 + w.pointwise_again)

    casts, casts_back = _casts(w, hw)
    f["8-bit casts"], b["8-bit casts"] = casts, casts_back
    f["communication: tp"], b["communication: tp"] = _tensor_parallel(w, hw)
    f["communication: cp"], b["communication: cp"] = _context_parallel(w, hw, attention)
    return _Block(f, b, weights=forward)


def _head(w: Workload, hw: Hardware) -> _Block:
    """Output projection, loss and embedding, for one microbatch."""
    tokens = w.tokens
    output = Linear("output", w.dim, w.vocab // w.tp, w.head_narrow, 0.0)
    product = _product(w, hw, output, tokens)
    # The softmax in fp32, forward and backward: some 9 passes over the logits, or 3 in one compiled kernel.
    loss = (12 if w.loss_compiled else 36) * w.vocab * tokens / w.tp / hw.bytes_per_s
    chunks = w.config.training.loss_chunks
    loss += (chunks > 1) * chunks * 10 * w.vocab_params / hw.bytes_per_s  # adds up the weight's gradient
    embedding = 3 * w.width * tokens * w.dim / w.tp / hw.bytes_per_s
    part = "head and loss"
    return _Block({part: product + loss / 3}, {part: 2 * product + loss * 2 / 3 + embedding}, product)


def _casts(w: Workload, hw: Hardware) -> tuple[float, float]:
    """Rounding the operands of 8-bit products: forward the inputs, backward the gradients and the inputs again.

    A value is read for its scale, read and written narrow: 2 + 2 + 1 bytes, of which fusion saves some.
    """
    narrow = [x for x in w.linears if x.narrow]
    inputs = {(x.name.rpartition(".")[0] if x.name[-2:] not in ("wo", "w2") else x.name): x.inputs for x in narrow}
    outputs = sum(x.outputs for x in narrow)
    scales = 1.0 if w.tensorwise else 2.0  # by rows and by columns
    per_token = scales * w.tokens / hw.bytes_per_s
    forward = 4 * sum(inputs.values()) * per_token
    backward = (5 * outputs + 3 * sum(inputs.values())) * per_token
    return forward, backward + forward * sum(x.again for x in narrow) / max(1, len(narrow))


def _tensor_parallel(w: Workload, hw: Hardware) -> tuple[float, float]:
    """Exposed seconds of one block's collectives: gathers before, reduce-scatters after attention and feed-forward."""
    if w.tp == 1:
        return 0.0, 0.0
    share = w.tokens * w.dim * (w.tp - 1) / w.tp / hw.bandwidth(w.tp, 1)
    gather, scatter = share * (1 if w.tensorwise else w.width) + hw.launch, share * w.width + hw.launch
    gathers, scatters = _tp_calls(w)
    forward, backward = 2 * (gather + scatter), (gathers - 2) * gather + (scatters - 2) * scatter
    visible = 1 - hw.async_tp if w.async_tp else 1.0
    return forward * visible, backward * visible


def _tp_calls(w: Workload) -> tuple[float, float]:
    """Gathers and reduce-scatters of one block and microbatch.

    Two of each forward, and backward, where gradients go the other way. What is computed again gathers its inputs
    again; with full checkpointing it scatters its results again, too, of which a compiler drops the last.
    """
    return 4 + 2 * w.pointwise_again, 4 + (1 if w.compiled else 2) * w.attention_again


def _context_parallel(w: Workload, hw: Hardware, attention: float) -> tuple[float, float]:
    """Exposed seconds of one block: keys and values travel around, and their gradients back."""
    if w.cp == 1:
        return 0.0, 0.0
    bandwidth = hw.bandwidth(w.cp, w.tp)
    size = 2 * w.width * w.tokens * w.kv_sent / w.tp * (w.cp - 1)
    exposed = max(0.0, size / bandwidth - attention / w.cp)  # the own keys are attended to meanwhile
    gradients = size * 4 / w.width / bandwidth
    if w.config.parallelism.context_parallel_rotate_method == "alltoall":  # each behind the next rank's attention
        exposed = max(0.0, size / bandwidth - attention)
        gradients = max(gradients / (w.cp - 1), gradients - 2.5 * attention)
    return exposed, exposed * (1 + w.attention_again) + gradients


def _transfer(w: Workload, hw: Hardware) -> float:
    """Seconds to send a microbatch's hidden states to the next stage, whose rank is a whole inner mesh away."""
    stride = w.world // w.pp
    size = w.width * w.tokens * w.dim / w.tp
    return size / hw.bandwidth(2, stride) + hw.launch


def _durations(w: Workload, block: _Block, head: _Block) -> Callable[[int, str], float]:
    """Seconds of a stage's computation, by stage and kind.

    A backward in two parts saves work only where autograd sees the operations of a block: a compiled block is one of
    them, which runs as a whole in both parts, and a checkpointed one is computed again for each.
    """
    forward, backward = sum(block.forward.values()), sum(block.backward.values())
    inputs = backward if w.compiled else backward - block.weights
    weights = block.weights if not w.compiled and w.config.activation_checkpoint.mode == "none" else backward
    blocks = {"F": forward, "B": backward, "I": inputs, "W": weights}
    end = {"F": sum(head.forward.values()), "B": sum(head.backward.values()), "W": head.weights}
    end["I"] = end["B"] - end["W"]

    def duration(index: int, kind: str) -> float:
        return w.stages[index].layers * blocks[kind] + w.stages[index].projects * end[kind]

    return duration


def _fsdp(w: Workload, hw: Hardware) -> tuple[float, float]:
    """Seconds to gather one block's weights, and to reduce its gradients, over the data-parallel ranks."""
    gather = reduce = 0.0
    if w.fsdp > 1:
        bandwidth, share = hw.bandwidth(w.fsdp, w.tp), (w.fsdp - 1) / w.fsdp
        hops = hw.latency * (w.fsdp - 1) if w.fsdp * w.tp > hw.gpus_per_node else hw.launch
        gather = w.block_params * (1 if w.narrow_gather else w.width) * share / bandwidth + hops
        reduce = w.block_params * 4 * share / bandwidth + hops
    if w.replicate > 1:
        bandwidth = hw.bandwidth(w.replicate, w.tp * w.fsdp)
        reduce += 2 * 4 * w.block_params / w.fsdp * (w.replicate - 1) / w.replicate / bandwidth
    return gather, reduce


def _exposed(w: Workload, hw: Hardware, block: _Block, stage: Stage) -> Seconds:
    """FSDP's communication that compute doesn't hide, and the compute that it slows down."""
    gather, reduce = _fsdp(w, hw)
    forward, backward = sum(block.forward.values()), sum(block.backward.values())
    layers, times = stage.layers, w.accumulation
    ends = w.vocab_params / w.block_params * (stage.embeds + stage.projects)
    behind_forward = layers * max(0.0, gather - forward)
    if w.pipeline is None:
        again = gather if w.config.parallelism.fsdp_reshard_after_forward != "never" else 0.0
        late = layers * max(0.0, again - backward)
        last = layers * max(0.0, again + reduce - backward) + reduce * (1 + ends / 2)
        exposed = (gather * (1 + ends) + behind_forward) * times + late * (times - 1) + last
        beside = layers * (times * (min(gather, forward) + min(again, backward)) + min(reduce, backward))
    else:
        # Gathered once for all microbatches of a batch, beside the first; reduced beside the last.
        exposed = gather * (1 + ends) + behind_forward + reduce + layers * max(0.0, reduce - backward)
        exposed, beside = exposed * times, 0.0
    out = {"communication: dp": exposed}
    if w.fsdp * w.replicate > 1:
        out["slowed by communication"] = hw.overlap_slowdown * beside
    if w.config.training.enable_cpu_offload:  # every gather reads from the host, every gradient goes there
        shard = sum(map(w.params, w.of_rank(stage.rank))) / w.fsdp
        out["host memory"] = shard * (w.stored * 2 * times + 4) / hw.host_link
    return out


def _optimizer(w: Workload, hw: Hardware) -> float:
    """Reads and writes of the update and the clipping; Muon's matrix products on top."""
    optimizer = w.config.optimizer
    shard = max(sum(map(w.params, w.of_rank(rank))) for rank in range(w.pp)) / w.fsdp
    moved = 40 if optimizer.implementation == "fused" else 70
    bandwidth = hw.host_link if w.config.training.enable_cpu_offload else hw.bytes_per_s
    seconds = shard * moved / bandwidth
    if optimizer.name == "Muon":
        layers = sum(stage.layers for stage in w.of_rank(0))
        flops = sum(_newton_schulz(x.inputs, x.outputs) for x in w.linears) * optimizer.muon_ns_steps * layers
        seconds += flops / w.fsdp / (hw.bf16 * hw.gemm_bf16)
    return seconds


def _newton_schulz(rows: int, columns: int) -> float:
    """FLOPs of one iteration on a matrix: X X', (X X')^2, and that times X."""
    short, long = sorted((rows, columns))
    return 4.0 * short * short * long + 2.0 * short**3


def collectives(w: Workload, pp_rank: int = 0) -> Collectives:
    """What one rank of a pipeline rank communicates in a step, by mesh axis.

    Bytes are the size of the larger side: of what is gathered, reduced or reduce-scattered.
    """
    out = Collectives()
    stages = w.of_rank(pp_rank)
    layers, times = sum(stage.layers for stage in stages), w.microbatches * w.accumulation
    weights = sum(map(w.params, stages))
    hidden = w.tokens * w.dim
    ends = weights - layers * w.block_params
    groups = layers + (ends > 0)
    reductions = w.accumulation if w.pipeline else 1  # a pipeline reduces at the end of each batch
    if w.fsdp > 1:
        narrow = 1 if w.narrow_gather else w.width
        reshard = "never" if w.pipeline else w.config.parallelism.fsdp_reshard_after_forward
        # For the backward again, but for what is kept: nothing, or by default the last block and the ends.
        again = {"never": 0, "default": max(0, layers - 1), "always": layers}[reshard]
        batches = w.accumulation
        out.add("fsdp", "all_gather", batches * (layers + again), w.block_params * narrow)
        out.add("fsdp", "all_gather", batches * (groups - layers) * (1 + (reshard == "always")), ends * w.width)
        out.add("fsdp", "reduce_scatter", groups * reductions, weights / groups * 4)
    if w.replicate > 1:
        out.add("dp_replicate", "all_reduce", groups * reductions, weights / groups / w.fsdp * 4)
    if w.tp > 1:
        gathers, scatters = _tp_calls(w)
        out.add("tp", "all_gather", gathers * layers * times, hidden * (1 if w.tensorwise else w.width))
        out.add("tp", "reduce_scatter", scatters * layers * times, hidden * w.width)
        ends_of_model = sum(stage.embeds + stage.projects for stage in stages)
        for operation in ("all_gather", "reduce_scatter"):  # one forward, the other backward
            out.add("tp", operation, ends_of_model * times, hidden * w.width)
    if w.cp > 1:
        passes, own = 2 + w.attention_again, 2 * w.width * w.tokens * w.kv_sent / w.tp
        if w.config.parallelism.context_parallel_rotate_method == "alltoall":
            out.add("cp", "all_to_all", passes * (w.cp - 1) * layers * times, own)
            out.add("cp", "all_to_all", w.cp * layers * times, own * 4 / w.width)
        else:
            out.add("cp", "all_gather", passes * layers * times, own * w.cp)
            out.add("cp", "reduce_scatter", layers * times, own * w.cp * 4 / w.width)
    if w.pp > 1:
        last = len(w.stages) - 1
        sends = sum((index < last) + (index > 0) for index, stage in enumerate(w.stages) if stage.rank == pp_rank)
        out.add("pp", "send", sends * times, hidden / w.tp * w.width)
    return out
