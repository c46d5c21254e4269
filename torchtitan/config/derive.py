"""Values derived from other keys, each by one function. `torchtitan config --explain` shows their
formulas.

Meaning of `lr_scheduler.name`:

name                    decay_ratio               decay_type
linear, sqrt, cosine    every step after warm-up  the name
wsd                     as given, default 0.2     as given, default linear
constant                0
unset                   as given, default every   as given, default linear
                        step after warm-up
"""

import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from torchtitan.config.sections.data import Source, ValidationSet
from torchtitan.config.sections.parallelism import ActivationCheckpoint, Parallelism
from torchtitan.config.sections.schema import Config
from torchtitan.config.sections.training import Training, Validation
from torchtitan.config.types import Section

SectionT = TypeVar("SectionT", bound=Section)
DerivedValue = tuple[str, Any, str]
"""(key, value, formula)."""

DEGREE_KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""Mesh axis, from outer to inner, to the key of its degree in `[parallelism]`."""
AXES = tuple(DEGREE_KEYS)
"""Mesh axes. Inner axes communicate most, so their ranks are placed closest."""

SHAPES = ("linear", "sqrt", "cosine")
"""Shapes of a learning rate's decay."""
_STAGE_KEYS = ("seq_len", "global_batch_size", "local_batch_size")
"""Keys of `[training]` that a stage may change."""
_STAGE_ROPE_KEYS = ("rope_theta", "rope_scaling")
"""Keys of `[model.overrides]` that a stage may change."""
_EQUAL_TO = {
    "validation.seq_len": ["training.seq_len"],
    "validation.local_batch_size": ["training.local_batch_size"],
    # The same rows on any number of ranks, unlike the default of `training.global_batch_size`.
    "validation.global_batch_size": ["training.global_batch_size", "validation.local_batch_size"],
    "lr_scheduler.total_steps": ["training.steps"],
}
"""Keys that, unless set, equal the first of others that is set; `[training]` before any stage."""
_WSD_DECAY = 0.2
"""The default share of the decay (Hägele et al., arXiv:2405.18392)."""


def axis_degrees(parallelism: Parallelism) -> dict[str, int]:
    """Degree of each mesh axis, in order."""
    return {axis: getattr(parallelism, key) for axis, key in DEGREE_KEYS.items()}


def layout_degrees(parallelism: Parallelism) -> dict[str, int]:
    """Degrees of the mesh axes, and of expert parallelism, which shares their ranks."""
    return axis_degrees(parallelism) | {"ep": parallelism.expert_parallel_degree}


def expert_ranks(parallelism: Parallelism) -> int:
    """Ranks over which expert parallelism and FSDP split the experts: dp_shard x cp x tp."""
    p = parallelism
    return p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree


def expert_shard_dim(experts: int, shards: int) -> int:
    """Dimension along which FSDP shards a stack of `experts` matrices over `shards` ranks.

    Whole matrices if they divide evenly: gathering them needs no extra copy, and Muon no
    communication.
    """
    return 0 if experts % shards == 0 else 1


def layout_name(degrees: Mapping[str, int]) -> str:
    """The axes with more than one rank: `dp_shard 2 x tp 2`."""
    return " x ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one rank"


def divisors(n: int, limit: int | None = None) -> list[int]:
    """Divisors of `n` up to `limit`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    all_divisors = [*small, *(n // d for d in reversed(small) if d * d < n)]
    return [d for d in all_divisors if d <= (limit or n)]


def _replica_degree(config: Config, world: int) -> DerivedValue | None:
    """Fewer replicas, if an elastic run has fewer ranks. Replicas go first, because sharding over
    fewer ranks needs more memory on each.
    """
    p = config.parallelism
    others = p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree
    ranks, remainder = divmod(world, others)
    if not config.fault_tolerance.elastic or remainder or not ranks:
        return None
    shards = min(max(1, p.data_parallel_shard_degree), ranks)
    limit = min(p.data_parallel_replicate_degree, ranks // shards)
    value = divisors(ranks, limit)[-1]
    if value == p.data_parallel_replicate_degree:
        return None
    text = (
        f"at most {p.data_parallel_replicate_degree} of {shards} or more, for {ranks} "
        "data-parallel ranks"
    )
    return "parallelism.data_parallel_replicate_degree", value, text


def _shard_degree(config: Config, world: int) -> DerivedValue | None:
    degree = config.parallelism.data_parallel_shard_degree
    if degree != -1 and not (degree > 0 and config.fault_tolerance.elastic):
        return None
    others = {
        DEGREE_KEYS[a]: d
        for a, d in axis_degrees(config.parallelism).items()
        if a != "dp_shard" and d > 1
    }
    value = max(1, world // math.prod(others.values()))
    if value == degree:
        return None
    text = " / ".join([f"{world} ranks", *(f"{key} {degree}" for key, degree in others.items())])
    return "parallelism.data_parallel_shard_degree", value, text


def _expert_degree(config: Config, world: int) -> DerivedValue | None:
    """A smaller expert-parallel degree, if an elastic run has fewer ranks. A divisor of the degree
    still divides the experts.
    """
    p = config.parallelism
    degree = p.expert_parallel_degree
    ranks = expert_ranks(p)
    value = math.gcd(degree, ranks)
    if not config.fault_tolerance.elastic or value == degree:
        return None
    text = f"at most {degree}, for experts on {ranks} ranks"
    return "parallelism.expert_parallel_degree", value, text


def _global_batch(config: Config, world: int) -> DerivedValue | None:
    t = config.training
    dp = data_parallel_degree(config)
    if t.global_batch_size != -1 or config.fault_tolerance.elastic:
        return None
    text = f"local_batch_size {t.local_batch_size} x data-parallel degree {dp}"
    return "training.global_batch_size", t.local_batch_size * dp, text


def _warmup(config: Config, world: int) -> DerivedValue | None:
    s = config.lr_scheduler
    if s.total_steps is None or s.warmup_steps <= s.total_steps:
        return None
    text = f"{s.warmup_steps} cut to total_steps {s.total_steps}"
    return "lr_scheduler.warmup_steps", s.total_steps, text


def _decay_type(config: Config, world: int) -> DerivedValue | None:
    s = config.lr_scheduler
    if s.decay_type is not None:
        return None
    if s.name in SHAPES:
        return "lr_scheduler.decay_type", s.name, "lr_scheduler.name"
    if s.name in (None, "wsd"):
        return "lr_scheduler.decay_type", "linear", "the default shape"
    return None


def _decay_ratio(config: Config, world: int) -> DerivedValue | None:
    s = config.lr_scheduler
    if s.decay_ratio is not None or s.name not in ("wsd", "constant"):
        return None
    ratio = _WSD_DECAY if s.name == "wsd" else 0.0
    return "lr_scheduler.decay_ratio", ratio, f"lr_scheduler.name {s.name}"


def _decay_after_warmup(config: Config, world: int) -> DerivedValue | None:
    """A short run of a long schedule, as by `--training.steps 10`, has fewer steps to decay in."""
    s = config.lr_scheduler
    if s.decay_ratio is None or s.total_steps is None:
        return None
    steps = s.total_steps - s.warmup_steps
    if round(s.total_steps * s.decay_ratio) <= steps:
        return None
    text = (
        f"{s.decay_ratio:g} cut to {steps} steps, which {s.warmup_steps} warmup_steps leave of "
        f"{s.total_steps}"
    )
    return "lr_scheduler.decay_ratio", steps / s.total_steps, text


_DERIVATIONS: tuple[Callable[[Config, int], DerivedValue | None], ...] = (
    _replica_degree,
    _shard_degree,
    _expert_degree,
    _global_batch,
    _warmup,
    _decay_type,
    _decay_ratio,
    _decay_after_warmup,
)
"""Applied in order: a later one sees the values of earlier ones."""


def derive(config: Config, world: int) -> tuple[Config, dict[str, str]]:
    """`config` with every derived value for `world` ranks, and the formula of each derived key."""
    formulas = {}
    for key, others in _EQUAL_TO.items():
        if attrgetter(key)(config) in (None, -1):
            formulas[key] = next(other for other in others if attrgetter(other)(config) != -1)
            config = replace(config, key, attrgetter(formulas[key])(config))
    for derivation in _DERIVATIONS:
        if result := derivation(config, world):
            key, value, formulas[key] = result
            config = replace(config, key, value)
    return config, formulas


def warnings(
    base: Config, config: Config, formulas: dict[str, str], sources: dict[str, str]
) -> Iterator[str]:
    """A warning for each value in the configuration that the schedule's length has cut, and for
    validation on longer rows than training's.

    Args:
        base: the configuration before values were derived.
        formulas, sources: as in `Resolved`.
    """
    reasons = {
        name: formulas[name]
        for key in ("warmup_steps", "decay_ratio")
        if getattr(base.lr_scheduler, key) is not None
        and (name := f"lr_scheduler.{key}") in formulas
    }
    longest = max(stage.training.seq_len for stage in stages_of(config))
    if config.validation.enable and config.validation.seq_len > longest:
        reasons["validation.seq_len"] = (
            f"{config.validation.seq_len} is longer than training's rows of {longest}, so the "
            "loss includes positions that this run doesn't train"
        )
    for name, reason in reasons.items():
        source = sources.get(name, "default")
        start = name if source == f"--{name}" else f"{source}: {name}"
        yield f"{start}: {reason}"


def ranks_of(config: Config) -> int:
    """The ranks that the degrees of a derived configuration fill."""
    return math.prod(axis_degrees(config.parallelism).values())


def replace(section: SectionT, key: str, value: Any) -> SectionT:
    """A copy of a configuration, or of a section, with the dotted `key` set to `value`."""
    name, _, subkey = key.partition(".")
    if subkey:
        value = replace(getattr(section, name), subkey, value)
    return section.model_copy(update={name: value})


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with values by their dotted keys."""
    for key, value in settings.items():
        config = replace(config, key, value)
    return config


def data_parallel_degree(config: Config) -> int:
    """Number of ranks that read different rows. The shard degree must be derived already."""
    p = config.parallelism
    return p.data_parallel_replicate_degree * p.data_parallel_shard_degree


def compiles_blocks(config: Config) -> bool:
    """Whether each transformer block is a compiled graph."""
    return config.compile.enable and "model" in config.compile.components


def selects_operations(ac: ActivationCheckpoint) -> bool:
    """Whether activation checkpointing chooses what to keep by operation, not by block."""
    return ac.mode == "selective" and ac.selective_ac_option == "op"


def offloaded_blocks(ac: ActivationCheckpoint, blocks: int) -> int:
    """Number of a pipeline stage's first blocks whose activations wait in host memory."""
    return blocks if ac.offload_blocks < 0 else min(ac.offload_blocks, blocks)


def sums_whole_gradients(config: Config) -> bool:
    """Whether a step's batches add up in whole gradients, reduced after the last, not in shards.

    Whole gradients cost nothing if a rank's shard is everything and stays on the device. FSDP adds
    them up in the type in which it reduces them.
    """
    p = config.parallelism
    t = config.training
    shards = p.data_parallel_shard_degree * p.context_parallel_degree
    if p.expert_parallel_degree > 1:
        shards = max(shards, expert_ranks(p) // p.expert_parallel_degree)
    is_free = shards == 1 and not t.enable_cpu_offload and t.mixed_precision_reduce == "float32"
    return p.fsdp_reduce_once_per_step or is_free


def sums_on_replicas(config: Config) -> bool:
    """Whether each replica adds up a step's batches by itself, and all-reduces after the last one.

    It does so on the device, in the type of the reduction. So shards that can add up in host
    memory, or are reduced in bf16, are all-reduced after each batch and add up in fp32.
    """
    t = config.training
    on_device = not t.enable_cpu_offload or t.dtype == "bfloat16"
    return on_device and t.mixed_precision_reduce == "float32"


def needs_replica_axis(config: Config) -> bool:
    """Whether FSDP needs an axis of replicas even for a single replica.

    FSDP rounds reduced gradients to the parameters' type before adding them up; a replica adds up
    its own first. So if parameters are stored in bf16 and gradients accumulate in shards, a single
    replica is an axis too.
    """
    in_shards = gradient_accumulation_steps(config) > 1 and not sums_whole_gradients(config)
    return config.training.dtype == "bfloat16" and in_shards


def stages_of(config: Config) -> list[Config]:
    """The configuration before the first of `[[training.stages]]`, and in each of them.

    Weights of sources and learning rates don't change: nothing on a rank is built for them.
    """
    configs = [replace(config, "training.stages", [])]
    for stage in config.training.stages:
        last = configs[-1]
        changes = {key: value for key in _STAGE_KEYS if (value := getattr(stage, key)) is not None}
        rope = {key: value for key in _STAGE_ROPE_KEYS if (value := getattr(stage, key))}
        sections = {
            "training": last.training.model_copy(update=changes),
            "model": last.model.model_copy(update={"overrides": last.model.overrides | rope}),
        }
        configs.append(last.model_copy(update=sections))
    return configs


def new_shapes(config: Config) -> list[bool]:
    """Whether each stage of the data computes on other shapes, or positions, than all before it."""
    shape = attrgetter("training.local_batch_size", "training.seq_len", "model.overrides")
    shapes = list(map(shape, stages_of(config)))
    return [x not in shapes[:i] for i, x in enumerate(shapes)]


def data_sections(
    config: Config,
) -> Iterator[tuple[str, Training | Source | Validation | ValidationSet]]:
    """The sections and tables that name data, with their keys."""
    t, v = config.training, config.validation
    if not t.sources:
        yield "training", t
    for source in t.sources:
        yield f"training.sources.{source.name}", source
    if not v.enable:
        return
    if not v.sets:
        yield "validation", v
    for held_out in v.sets:
        yield f"validation.sets.{held_out.name}", held_out


def rows_of(config: Config, key: str) -> dict[str, int]:
    """A key of `[training]` and, if it is enabled, of `[validation]`."""
    sections = ("training", "validation")[: 1 + config.validation.enable]
    return {name: getattr(getattr(config, name), key) for name in sections}


def longest_row(config: Config, stage: int) -> int:
    """Length of the longest row that the model reads up to a stage of the data."""
    return max(max(rows_of(x, "seq_len").values()) for x in stages_of(config)[: stage + 1])


def validation_rows(config: Config) -> int:
    """Rows per forward pass of validation on a rank: at most its share, in whole microbatches."""
    v = config.validation
    p = config.parallelism
    unit = p.pipeline_parallel_microbatch_size if p.pipeline_parallel_degree > 1 else 1
    share = math.ceil(v.global_batch_size / data_parallel_degree(config))
    return min(v.local_batch_size, math.ceil(share / unit) * unit)


def gradient_accumulation_steps(config: Config) -> int:
    """Forward and backward passes per optimizer step on each rank; the maximum over stages."""
    ranks = data_parallel_degree(config)
    sections = [stage.training for stage in stages_of(config)]
    passes = [math.ceil(t.global_batch_size / (t.local_batch_size * ranks)) for t in sections]
    return max(0, *passes)
