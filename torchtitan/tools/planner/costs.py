"""The performance model: seconds of one training step, by cause.

Blocks and the model's ends (`block_time.py`) add up along the step. Communication is bytes over the
bandwidth of its ring, less what compute hides (`comm_time.py`). `pipeline_costs.py` has the wait of
a pipeline's ranks for each other. What depends on the hardware is in `hardware.py`;
`docs/internals/plan.md` lists the formulas with their sources.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.tools.planner.block import block_layers
from torchtitan.tools.planner.block_time import LAUNCHES, Pass, block_time, ends_time
from torchtitan.tools.planner.comm_time import activation_offload, data_parallel, transfer
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.pipeline_costs import batch_time
from torchtitan.tools.planner.pipeline_timeline import Timeline, program, simulate
from torchtitan.tools.planner.stages import PlannedStage
from torchtitan.tools.planner.workload import FP32, Workload

ADAMW_BYTES_FUSED = 40
ADAMW_BYTES = 70
"""Bytes moved per parameter of a shard. Fused: AdamW reads parameter, gradient and two moments and
writes all but the gradient (28), the norm reads the gradient (4), clipping reads and writes it (8).
Not fused: with temporary tensors, an estimate.
"""
BUBBLE = "pipeline bubble"
REPEATED = "repeated by a split backward"
"""Parts of a step's time with a pipeline: ranks wait for each other, and compute twice what a
schedule splits.
"""


@dataclass(frozen=True)
class StepTime:
    """One training step."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by what they are spent on, the largest first; they add up to `seconds`. In a
    pipeline, compute is that of the average rank; what follows the pipeline, that of the slowest.
    """
    tokens_per_second: float
    """Per GPU."""
    host_doubt: float = 0.0
    """Share by which the step is longer if launches take `HOST_DOUBT` longer."""

    @property
    def late_host(self) -> float:
        """Share of the step in which the average rank's device waits for the host's launches."""
        return self.parts.get(LAUNCHES, 0.0) / self.seconds

    @property
    def bubble(self) -> float:
        """Share of the step that the average rank spends waiting for the pipeline."""
        return self.parts.get(BUBBLE, 0.0) / self.seconds


@dataclass(frozen=True)
class Passes:
    """Seconds of one block of each kind, and of the model's ends, for one microbatch."""

    blocks: Sequence[Pass]
    ends: Pass

    def counted(self, w: Workload) -> Iterator[tuple[Pass, float]]:
        """Each of them, with how often the average rank runs it in one step."""
        counts = [sum(column) for column in zip(*(stage.kinds for stage in w.stages), strict=True)]
        outputs = sum(stage.has_output for stage in w.stages)
        for work, count in zip([*self.blocks, self.ends], [*counts, outputs], strict=True):
            yield work, count * w.microbatches * w.accumulation / w.pp

    def seconds(self, w: Workload) -> float:
        """Compute and inner communication of the average rank in one step: less than the step."""
        return sum(count * (work.forward + work.backward) for work, count in self.counted(w))


def passes(w: Workload, hw: Hardware) -> Passes:
    return Passes([block_time(block, hw) for block in w.blocks], ends_time(w, hw))


def step_time(w: Workload, hw: Hardware) -> StepTime:
    """Time of one step of `w` on `hw`."""
    known = passes(w, hw)
    blocks, ends = known.blocks, known.ends
    parts: defaultdict[str, float] = defaultdict(float)
    slowest = 0
    doubt = 0.0
    for work, count in known.counted(w):
        for part, both in work.parts.items():
            parts[part] += count * sum(both)
        doubt += count * work.host_doubt
    if w.pipeline is not None:
        batch = batch_time(w.pipeline, w.microbatches, _durations(w, blocks, ends), transfer(w, hw))
        slowest = max(range(w.pp), key=batch.busy.__getitem__)
        repeated = sum(batch.busy) / w.pp * w.accumulation - sum(parts.values())
        parts[BUBBLE] = batch.bubble * w.accumulation
        if repeated > 1e-9 * batch.length:  # beyond rounding
            parts[REPEATED] = repeated
    times = [(block.forward, block.backward) for block in blocks]
    stage = max(w.stages_of(slowest), key=lambda stage: stage.layers)
    parts |= data_parallel(w, hw, times, stage)
    parts["activation offload"] = activation_offload(w, hw, times, slowest)
    parts["optimizer"] = _optimizer(w, hw)
    parts["host"] = hw.step_overhead
    nodes = math.ceil(w.world / hw.gpus_per_node)
    waiting = sum(parts.values()) * hw.node_variation * math.log2(nodes)
    parts["waiting for the slowest node"] = waiting
    seconds = sum(parts.values())
    slowest_first = sorted(parts.items(), key=lambda item: -item[1])
    ordered = {part: spent for part, spent in slowest_first if spent > 0}
    speed = w.tokens_per_step / seconds / w.world
    return StepTime(seconds, ordered, speed, host_doubt=doubt / seconds)


# ---- the pipeline


def timeline(w: Workload, hw: Hardware) -> Timeline:
    """One batch of a pipeline as the trainer runs it: when each rank computes what."""
    assert w.pipeline is not None, "a timeline needs a pipeline"
    known = passes(w, hw)
    durations = _durations(w, known.blocks, known.ends)
    return simulate(program(w.pipeline, w.microbatches), durations, transfer(w, hw))


def _durations(w: Workload, blocks: Sequence[Pass], ends: Pass) -> Callable[[int, str], float]:
    """Seconds of a stage's computation, by stage and kind (`F`, `B`, `I`, `W`).

    Splitting a backward saves work only where autograd sees a block's operations one by one. A
    compiled block is a single operation, all of which runs in both parts. An eager checkpointed
    block is recomputed for the inputs' gradients, and once more for each of its weights: autograd
    is asked for them one by one.
    """
    kinds = [_seconds_by_kind(b, work) for b, work in zip(w.blocks, blocks, strict=True)]
    end = {"F": ends.forward, "B": ends.backward, "W": ends.weights}
    end["I"] = end["B"] - end["W"]

    def seconds(stage: PlannedStage) -> dict[str, float]:
        return {
            kind: stage.has_output * end[kind]
            + sum(count * block[kind] for count, block in zip(stage.kinds, kinds, strict=True))
            for kind in "FBIW"
        }

    unlike = {stage: seconds(stage) for stage in set(w.stages)}
    by_stage = [unlike[stage] for stage in w.stages]
    return lambda index, kind: by_stage[index][kind]


def _seconds_by_kind(w: Workload, block: Pass) -> dict[str, float]:
    """Seconds of one block by kind of computation."""
    inputs = weights = block.backward
    if not w.compiled:
        inputs -= block.weights
        weights = block.weights + _parameters(w) * w.recompute.pointwise * block.forward
    return {"F": block.forward, "B": block.backward, "I": inputs, "W": weights}


def _parameters(w: Workload) -> int:
    """Number of weights in a block: linear layers, two norms, and the norms of heads."""
    return len(w.linears) + 2 + 2 * w.args.qk_norm


# ---- the optimizer


def _optimizer(w: Workload, hw: Hardware) -> float:
    """Seconds of clipping, update and weight average, on the rank with the most parameters."""
    optimizer = w.config.optimizer
    ema = w.config.ema
    shard = max(sum(map(w.shard, w.stages_of(rank))) for rank in w.unlike_ranks)
    moved: float = ADAMW_BYTES_FUSED if optimizer.implementation == "fused" else ADAMW_BYTES
    if ema.enable:  # reads weight and average, and writes the average
        moved += (w.stored + 2 * FP32) / ema.every
    bandwidth = hw.host_link if w.config.training.enable_cpu_offload else hw.bytes_per_s
    seconds = shard * moved / bandwidth
    if optimizer.name == "Muon":
        flops = max(_orthogonalized(w, rank) for rank in range(w.pp))
        seconds += flops * optimizer.muon_ns_steps / (hw.bf16 * hw.gemm_bf16)
    return seconds


def _orthogonalized(w: Workload, rank: int) -> float:
    """FLOPs of one of Muon's iterations on a pipeline rank.

    Ranks share the matrices of a shape, or, where gradients are used up in the backward, those of a
    parameter.
    """
    flops = 0.0
    alike: Counter[tuple[float, int]] = Counter()
    for block, count in w.counted(w.stages_of(rank)):
        layers = block_layers(block.args, block.kind, block.mixing)
        for layer, x in zip(layers, block.linears, strict=True):
            shards = block.fsdp * (1 if layer.split == "tokens" else block.tp)
            if x.experts:
                shards = block.efsdp
            each = _newton_schulz_flops(layer.inputs, layer.outputs)
            matrices = max(1, x.experts)
            if w.config.optimizer.early_step_in_backward:
                flops += count * math.ceil(matrices / shards) * each
            else:
                alike[each, shards] += count * matrices
    return flops + sum(math.ceil(n / shards) * each for (each, shards), n in alike.items())


def _newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of one Muon iteration on a matrix X: A = X X', A A, and a polynomial in A times X.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    short, long = sorted((rows, columns))
    return 4.0 * short * short * long + 2.0 * short**3
