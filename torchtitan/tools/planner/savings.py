"""Changes that lower the predicted peak memory, for a run that doesn't fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.config.derive import divisors, gradient_accumulation_steps
from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec
from torchtitan.tools.planner.axes import applied
from torchtitan.tools.planner.memory import GIB, predict_memory
from torchtitan.tools.planner.predict import derived_workload
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import show_gib

SHOWN = 5
_WORTHWHILE = 0.02
"""Share of the peak from which a change is worth naming."""
_LOSS_CHUNKS = 8
_CHANGES_TRAINING = ("training.seq_len", "optimizer.state_dtype")
"""Keys that change what is trained: named last, whatever they save."""


@dataclass(frozen=True)
class Saving:
    """A legal change of the configuration that lowers the peak."""

    settings: dict[str, Any]
    """Key to value."""
    ranks: int
    before: float
    """Peak of the pipeline rank that needs most, in GiB."""
    after: float

    def __str__(self) -> str:
        settings = ", ".join(f"{key} = {_toml(value)}" for key, value in self.settings.items())
        return f"{settings}: {show_gib(self.after)} ({self.after - self.before:+.1f})"


def savings(config: Config, spec: ModelSpec, world: int) -> list[Saving]:
    """Changes that lower the predicted peak, largest saving first, changes of training last.

    Args:
        config: derived and validated for `world` ranks.
    """
    now = derived_workload(config, spec, world)
    before = predict_memory(now).reserved / GIB
    found = []
    for settings, ranks in _candidates(config, world, mixture=now.experts > 0):
        changed = applied(config, settings)
        try:
            after = predict_memory(derived_workload(changed, spec, ranks)).reserved / GIB
        except ConfigError:
            continue
        if after < before * (1 - _WORTHWHILE):
            found.append(Saving(settings, ranks, before, after))
    return sorted(
        found,
        key=lambda saving: (not saving.settings.keys().isdisjoint(_CHANGES_TRAINING), saving.after),
    )


def _candidates(
    config: Config, world: int, *, mixture: bool
) -> Iterator[tuple[dict[str, Any], int]]:
    """Changes that may lower the peak, and the ranks they need, at the same global batch.

    Args:
        mixture: the model is a mixture of experts.
    """
    p = config.parallelism
    t = config.training
    ac = config.activation_checkpoint
    mode = "activation_checkpoint.mode"
    option = "activation_checkpoint.selective_ac_option"
    if ac.mode == "none":
        yield {mode: "selective", option: "op"}, world
    if ac.mode != "full":
        yield {mode: "full"}, world
    if not ac.offload_blocks:
        yield {"activation_checkpoint.offload_blocks": -1}, world
    part = t.seq_len // (p.context_parallel_degree * p.tensor_parallel_degree)
    if more := [chunks for chunks in divisors(part, _LOSS_CHUNKS) if chunks > t.loss_chunks]:
        yield {"training.loss_chunks": more[-1]}, world
    if p.pipeline_parallel_degree > 1 and p.pipeline_parallel_microbatch_size > 1:
        half = p.pipeline_parallel_microbatch_size // 2
        yield {"parallelism.pipeline_parallel_microbatch_size": half}, world
    if t.local_batch_size > 1:
        yield {"training.local_batch_size": t.local_batch_size // 2}, world
    if p.fsdp_reduce_once_per_step:
        yield {"parallelism.fsdp_reduce_once_per_step": False}, world
    if p.fsdp_reshard_after_forward == "never":
        yield {"parallelism.fsdp_reshard_after_forward": "default"}, world
    if mixture:
        # More ranks that share the experts gather less of them; fewer copy fewer rows.
        for degree in (2 * p.expert_parallel_degree, p.expert_parallel_degree // 2):
            yield {"parallelism.expert_parallel_degree": max(1, degree)}, world
    yield from _more_shards(config, world)
    if not t.enable_cpu_offload:
        yield {"training.enable_cpu_offload": True}, world
    if not config.optimizer.early_step_in_backward:
        yield {"optimizer.early_step_in_backward": True}, world
    if config.optimizer.state_dtype == "float32":
        yield {"optimizer.state_dtype": "bfloat16"}, world
    if t.seq_len > 1:
        yield {"training.seq_len": t.seq_len // 2}, world


def _more_shards(config: Config, world: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Shards in place of replicas, and twice the ranks."""
    p = config.parallelism
    t = config.training
    twice = {"parallelism.data_parallel_shard_degree": 2 * p.data_parallel_shard_degree}
    if p.data_parallel_replicate_degree % 2 == 0:
        half = {"parallelism.data_parallel_replicate_degree": p.data_parallel_replicate_degree // 2}
        yield half | twice, world
    if gradient_accumulation_steps(config) % 2 == 0:
        yield twice, 2 * world
    elif t.local_batch_size % 2 == 0:
        yield twice | {"training.local_batch_size": t.local_batch_size // 2}, 2 * world


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def advice(config: Config, spec: ModelSpec, world: int) -> str:
    """The best of `savings` under a heading, one a line; empty if the planner can't tell."""
    try:
        found = savings(config, spec, world)
    except Exception:  # the run has failed already; the planner's own failure is no news
        return ""
    if not found:
        return ""
    lines = [
        f"  {saving}{f' on {saving.ranks} ranks' if saving.ranks > world else ''}"
        for saving in found[:SHOWN]
    ]
    return "\n".join([f"What lowers the planned peak of {show_gib(found[0].before)}:", *lines])
