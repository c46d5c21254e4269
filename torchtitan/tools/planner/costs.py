"""The performance model: seconds of one training step, by cause.

Blocks and the model's ends (`block_time.py`) add up along the step. Communication is bytes over the
bandwidth of its ring, less the time that compute hides (`comm_time.py`). `pipeline_costs.py` has
the wait of a pipeline's ranks for each other. Constants of the hardware are in `hardware.py`;
`docs/internals/plan.md` lists the formulas with their sources.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.models.costs import FP32
from torchtitan.optim.muon import iteration_flops
from torchtitan.optim.optimizer import ADAMW_BYTES, CONVERTED_BYTES
from torchtitan.parallel.kinds import Stage
from torchtitan.tools.planner.block_time import LAUNCHES, Pass, block_time, ends_time
from torchtitan.tools.planner.comm_time import activation_offload, data_parallel, transfer
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.pipeline_costs import batch_time
from torchtitan.tools.planner.workload import Workload

NORMS = 2
"""Weights of a block that autograd is asked for beside those of linear layers."""
BUBBLE = "pipeline bubble"
REPEATED = "repeated by a split backward"
"""Causes of time with a pipeline: ranks wait for each other, and repeat work that a schedule
splits.
"""


@dataclass(frozen=True)
class StepTime:
    """One training step."""

    seconds: float
    by_cause: Mapping[str, float]
    """Seconds by their cause, the largest first; they add up to `seconds`. In a pipeline, compute
    is the average rank's, and the work after the pipeline the slowest rank's.
    """
    tokens_per_second: float
    """Per GPU."""
    host_doubt: float = 0.0
    """Share by which the step is longer if launches last `HOST_DOUBT` longer."""

    @property
    def late_host(self) -> float:
        """Share of the step in which the average rank's device waits for the host's launches."""
        return self.by_cause.get(LAUNCHES, 0.0) / self.seconds

    @property
    def bubble(self) -> float:
        """Share of the step that the average rank spends waiting for the pipeline."""
        return self.by_cause.get(BUBBLE, 0.0) / self.seconds


@dataclass(frozen=True)
class Passes:
    """Seconds of one block of each kind, and of the model's ends, for one microbatch."""

    blocks: Sequence[Pass]
    ends: Pass

    def run_counts(self, w: Workload) -> Iterator[tuple[Pass, float]]:
        """Each of them, with the number of times that the average rank runs it in one step."""
        counts = [sum(column) for column in zip(*(stage.kinds for stage in w.stages), strict=True)]
        outputs = sum(stage.has_output for stage in w.stages)
        for work, count in zip([*self.blocks, self.ends], [*counts, outputs], strict=True):
            yield work, count * w.microbatches * w.accumulation / w.pp

    def seconds(self, w: Workload) -> float:
        """Compute and inner communication of the average rank in one step: less than the step."""
        return sum(count * (work.forward + work.backward) for work, count in self.run_counts(w))


def passes(w: Workload, hw: Hardware) -> Passes:
    return Passes([block_time(block, hw) for block in w.blocks], ends_time(w, hw))


def step_time(w: Workload, hw: Hardware) -> StepTime:
    """Time of one step of `w` on `hw`."""
    timings = passes(w, hw)
    blocks, ends = timings.blocks, timings.ends
    by_cause: defaultdict[str, float] = defaultdict(float)
    slowest = 0
    host_doubt = 0.0
    for work, count in timings.run_counts(w):
        for cause, directions in work.by_cause.items():
            by_cause[cause] += count * sum(directions)
        host_doubt += count * work.host_doubt
    if w.pipeline is not None:
        batch = batch_time(w.pipeline, w.microbatches, _durations(w, blocks, ends), transfer(w, hw))
        slowest = max(range(w.pp), key=batch.busy.__getitem__)
        repeated_seconds = sum(batch.busy) / w.pp * w.accumulation - sum(by_cause.values())
        by_cause[BUBBLE] = batch.bubble * w.accumulation
        if repeated_seconds > 1e-9 * batch.length:  # beyond rounding
            by_cause[REPEATED] = repeated_seconds
    times = [(block.forward, block.backward) for block in blocks]
    stage = max(w.stages_of(slowest), key=lambda stage: stage.layers)
    by_cause |= data_parallel(w, hw, times, stage)
    by_cause["activation offload"] = activation_offload(w, hw, times, slowest)
    by_cause["optimizer"] = _optimizer(w, hw)
    by_cause["host"] = hw.step_overhead
    nodes = math.ceil(w.world / hw.gpus_per_node)
    waiting = sum(by_cause.values()) * hw.node_variation * math.log2(nodes)
    by_cause["waiting for the slowest node"] = waiting
    seconds = sum(by_cause.values())
    largest_first = sorted(by_cause.items(), key=lambda item: -item[1])
    ordered = {cause: spend for cause, spend in largest_first if spend > 0}
    speed = w.tokens_per_step / seconds / w.world
    return StepTime(seconds, ordered, speed, host_doubt=host_doubt / seconds)


# ---- the pipeline


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

    def seconds(stage: Stage) -> dict[str, float]:
        return {
            kind: stage.has_output * end[kind]
            + sum(count * block[kind] for count, block in zip(stage.kinds, kinds, strict=True))
            for kind in "FBIW"
        }

    seconds_of = {stage: seconds(stage) for stage in set(w.stages)}
    by_stage = [seconds_of[stage] for stage in w.stages]
    return lambda index, kind: by_stage[index][kind]


def _seconds_by_kind(w: Workload, block: Pass) -> dict[str, float]:
    """Seconds of one block by kind of computation."""
    inputs = weights = block.backward
    if not w.compiled:
        inputs -= block.weights
        weights = block.weights + (len(w.linears) + NORMS) * w.recompute.pointwise * block.forward
    return {"F": block.forward, "B": block.backward, "I": inputs, "W": weights}


# ---- the optimizer


def _optimizer(w: Workload, hw: Hardware) -> float:
    """Seconds of clipping, update and weight average, on the rank with the most parameters."""
    optimizer = w.config.optimizer
    ema = w.config.ema
    shard = max(sum(map(w.shard, w.stages_of(rank))) for rank in w.unlike_ranks)
    bytes_per_param: float = ADAMW_BYTES[optimizer.implementation]
    if optimizer.state_dtype == "bfloat16":
        bytes_per_param += CONVERTED_BYTES
    if ema.enable:  # reads weight and average, and writes the average
        bytes_per_param += (w.stored_bytes + 2 * FP32) / ema.every
    bandwidth = hw.host_link if w.config.training.enable_cpu_offload else hw.bytes_per_s
    seconds = shard * bytes_per_param / bandwidth
    if optimizer.name == "Muon":
        flops = max(_orthogonalization_flops(w, rank) for rank in range(w.pp))
        seconds += flops * optimizer.muon_ns_steps / (hw.bf16 * hw.gemm_bf16)
    return seconds


def _orthogonalization_flops(w: Workload, rank: int) -> float:
    """FLOPs of one of Muon's iterations on a pipeline rank.

    Ranks share the matrices of a shape, or, where gradients are used up in the backward, a
    parameter's matrices.
    """
    flops = 0.0
    matrices_by_size: Counter[tuple[float, int]] = Counter()
    for block, count in w.block_counts(w.stages_of(rank)):
        for product, x in zip(block.cost.products, block.linears, strict=True):
            shards = block.efsdp if x.experts else block.fsdp * x.shards
            flops_per_matrix = iteration_flops(product.inputs, product.outputs)
            matrices = max(1, x.experts)
            if w.config.optimizer.early_step_in_backward:
                flops += count * math.ceil(matrices / shards) * flops_per_matrix
            else:
                matrices_by_size[flops_per_matrix, shards] += count * matrices
    return flops + sum(
        math.ceil(n / shards) * flops_per_matrix
        for (flops_per_matrix, shards), n in matrices_by_size.items()
    )
