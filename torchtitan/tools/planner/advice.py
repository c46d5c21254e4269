"""The largest costs of a plan, and the changes to its configuration that would lower each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import selects_operations
from torchtitan.config.rules import Facts, check
from torchtitan.tools.planner.axes import applied
from torchtitan.tools.planner.costs import BUBBLE, REPEATED
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.predict import Plan, derived_workload, predict
from torchtitan.tools.planner.workload import Workload
from torchtitan.utils.errors import ConfigError

COSTS = 3
"""Costs that a plan lists."""
CHANGES = 2
"""Changes listed for each."""
_WORTHWHILE = 1.005
"""Speed-up from which a change is suggested."""


@dataclass(frozen=True)
class Change:
    """A legal change of the configuration that makes training faster."""

    text: str
    settings: dict[str, Any]
    """Key to value."""
    after: Plan
    gain: float
    """Relative gain in tokens per second."""


@dataclass(frozen=True)
class Cost:
    """A part of the step's time."""

    part: str
    share: float
    changes: list[Change]
    otherwise: str
    """What to say if `changes` is empty."""


def largest_costs(plan: Plan) -> list[Cost]:
    """The largest parts of the step, each with changes that no larger one lists."""
    costs: list[Cost] = []
    listed: set[str] = set()
    for part, seconds in list(plan.time.parts.items())[:COSTS]:
        found = changes(plan, part)
        new = [change for change in found if change.text not in listed][:CHANGES]
        listed |= {change.text for change in new}
        otherwise = "the changes above lower this too" if found else "no setting lowers this"
        costs.append(Cost(part, seconds / plan.time.seconds, new, otherwise))
    return costs


def changes(plan: Plan, part: str) -> list[Change]:
    """Legal changes that target `part` and speed up training, the best first, misfits last."""
    found = []
    for text, settings in _candidates(plan.workload, plan.hardware, part):
        config = applied(plan.config, settings)
        try:
            check(config, Facts(device=plan.hardware.accelerator))
            after = predict(
                derived_workload(config, plan.spec, plan.workload.world), plan.spec, plan.hardware
            )
        except ConfigError:
            continue
        speedup = after.tokens_per_second / plan.tokens_per_second
        if speedup > _WORTHWHILE:
            found.append(Change(text, settings, after, speedup - 1))
    return sorted(found, key=lambda change: (not change.after.fits, -change.gain))


def _candidates(w: Workload, hw: Hardware, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes that may lower `part`: a description, and the keys to set."""
    t = w.config.training
    checkpointing = w.config.activation_checkpoint.mode
    compiled = {"compile.enable": True, "compile.components": ["model", "loss"]}
    double_batch = {
        "training.global_batch_size": 2 * t.global_batch_size,
        "training.local_batch_size": 2 * t.local_batch_size,
    }
    if part in ("matrix products", "pointwise", "attention") and checkpointing != "none":
        mode = "activation_checkpoint.mode"
        option = "activation_checkpoint.selective_ac_option"
        if not selects_operations(w.config.activation_checkpoint):
            yield "keep attention and every second product", {mode: "selective", option: "op"}
        yield "recompute nothing", {mode: "none"}
    if part == "matrix products" and hw.fp8 and not (w.float8 or w.mx):
        yield "Float8", {"model.converters": ["float8"]}
    recipe = w.config.quantize.linear.float8.recipe_name
    if (
        part in ("matrix products", "8-bit casts")
        and hw.fp8
        and not w.mx
        and recipe not in (None, "tensorwise")
    ):
        key = "quantize.linear.float8.recipe_name"
        yield "tensorwise Float8", {"model.converters": ["float8"], key: "tensorwise"}
    if part in ("pointwise", "head and loss", "8-bit casts") and not (
        w.compiled and w.loss_compiled
    ):
        yield "compile", compiled
    if part == "communication: tp":
        if not w.async_tp:
            yield "asynchronous TP", compiled | {"parallelism.enable_async_tensor_parallel": True}
        yield (
            "half the TP, twice the shards",
            {
                "parallelism.tensor_parallel_degree": w.tp // 2,
                "parallelism.data_parallel_shard_degree": 2 * w.dp_shard,
                "training.local_batch_size": max(1, t.local_batch_size // 2),
            },
        )
    if part == "communication: cp" and not w.by_heads:
        yield "send keys around a ring", {"parallelism.context_parallel_rotate_method": "alltoall"}
    if part == "communication: ep":
        yield (
            "half the expert parallelism",
            {"parallelism.expert_parallel_degree": max(1, w.ep // 2)},
        )
    if w.experts and part in ("communication: dp", "slowed by communication", "matrix products"):
        # Fewer ranks hold each expert: less to gather, and more rows for it.
        yield "twice the expert parallelism", {"parallelism.expert_parallel_degree": 2 * w.ep}
    if part in (BUBBLE, REPEATED):
        yield from _pipeline_candidates(w, part, double_batch)
    if part == "activation offload":
        yield "offload nothing", {"activation_checkpoint.offload_blocks": 0}
        yield "offload the blocks' inputs", {"activation_checkpoint.mode": "full"}
    if part in ("communication: dp", "slowed by communication", "optimizer", "host"):
        yield "double the batch", double_batch


def _pipeline_candidates(
    w: Workload, part: str, double_batch: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    p = w.config.parallelism
    t = w.config.training
    if part == BUBBLE:
        if t.local_batch_size > p.pipeline_parallel_microbatch_size:
            size = max(1, p.pipeline_parallel_microbatch_size // 2)
            yield "smaller microbatches", {"parallelism.pipeline_parallel_microbatch_size": size}
        yield "double the batch", double_batch
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
            yield f"schedule {schedule}", {"parallelism.pipeline_parallel_schedule": schedule}
    if part == REPEATED:
        for schedule in ("Interleaved1F1B", "1F1B"):
            yield f"schedule {schedule}", {"parallelism.pipeline_parallel_schedule": schedule}
