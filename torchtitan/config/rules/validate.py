"""Rules across keys. Each is a small function that yields what is wrong and which values are
legal.
"""

import math
import re
from collections.abc import Callable, Iterator

from torchtitan.config.derive import (
    DEGREE_KEYS,
    axis_degrees,
    data_parallel_degree,
    degrees_fill,
    divisors,
    expert_ranks,
)
from torchtitan.config.registry import unknown_dataset
from torchtitan.config.rules import checkpoints, mixtures
from torchtitan.config.rules import lr as lr_schedule
from torchtitan.config.rules.support import CONFLICTS, FLOAT8, MX, uses
from torchtitan.config.sections.data import Source, ValidationSet
from torchtitan.config.sections.metrics import Notifications, Prometheus
from torchtitan.config.sections.schema import Config, Training, Validation
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.text import brief, listed


def degrees_fill_the_world(config: Config, world: int) -> Iterator[str]:
    p = config.parallelism
    degrees = axis_degrees(config.parallelism)
    if p.data_parallel_shard_degree == 0:
        yield (
            "parallelism.data_parallel_shard_degree: got 0; set 1 for no sharding, or -1 for "
            "all ranks left"
        )
    elif not degrees_fill(config, world):
        used = {
            f"parallelism.{DEGREE_KEYS[a]}": d
            for a, d in degrees.items()
            if d > 1 or a == "dp_shard"
        }
        others = math.prod(degrees.values()) // degrees["dp_shard"]
        if world % others == 0:
            fits = f"set data_parallel_shard_degree = {world // others}"
        elif len(used) == 2:
            (key,) = used.keys() - {"parallelism.data_parallel_shard_degree"}
            fits = f"{key} must divide {world}: {listed(divisors(world))}"
        else:
            fits = (
                "the product of the degrees other than data_parallel_shard_degree, "
                f"{others}, must divide {world}"
            )
        product = " x ".join(f"{key} {degree}" for key, degree in used.items())
        yield f"{product} is {math.prod(degrees.values())}, but there are {world} ranks; {fits}"


def expert_degree_divides(config: Config, world: int) -> Iterator[str]:
    p = config.parallelism
    degree = p.expert_parallel_degree
    ranks = expert_ranks(p)
    if degrees_fill(config, world) and ranks % degree:
        yield (
            f"parallelism.expert_parallel_degree: {degree} does not divide "
            "data_parallel_shard_degree "
            f"{p.data_parallel_shard_degree} x context_parallel_degree "
            f"{p.context_parallel_degree} x "
            f"tensor_parallel_degree {p.tensor_parallel_degree} = {ranks}, whose ranks "
            "it shares; set it to one of "
            f"{listed(divisors(ranks))}"
        )


def batch_divides(config: Config, world: int) -> Iterator[str]:
    t = config.training
    dp = data_parallel_degree(config)
    unit = t.local_batch_size * dp
    # With wrong degrees the unit, and so the advice, would be wrong too.
    if config.fault_tolerance.elastic or not degrees_fill(config, world):
        return
    if t.global_batch_size <= 0 or t.global_batch_size % unit:
        below = t.global_batch_size // unit * unit
        legal = " or ".join(str(n) for n in (below, below + unit) if n > 0)
        yield (
            f"training.global_batch_size: {t.global_batch_size} is not a multiple of "
            "local_batch_size "
            f"{t.local_batch_size} x data-parallel degree {dp} = {unit}; set it to {legal}"
        )


def elastic_run_can_resume(config: Config, world: int) -> Iterator[str]:
    """A restart on other ranks must continue the same run, with the same command."""
    if not config.fault_tolerance.elastic:
        return
    c = config.checkpoint
    batch = config.training.global_batch_size
    dp = data_parallel_degree(config)
    why = "fault_tolerance.elastic"
    if batch <= 0:
        yield (
            f"training.global_batch_size: {why} keeps it fixed on any number of ranks; set "
            f"it to {dp} or more"
        )
    elif degrees_fill(config, world) and batch < dp:
        yield (
            f"training.global_batch_size: {batch} rows are too few for {dp} data-parallel "
            f"ranks; set {dp} or more"
        )
    if not c.enable or c.load_only:
        yield (
            f"checkpoint.enable: {why} resumes from checkpoints; set enable = true and "
            "load_only = false"
        )
    if c.load_step >= 0:
        yield (
            f"checkpoint.load_step: with {why} every restart would go back to step "
            f"{c.load_step}; set -1"
        )
    if c.exclude_from_loading:
        yield (
            f"checkpoint.exclude_from_loading: with {why} every restart would lose these "
            "parts; set []"
        )


def sequence_divides(config: Config, world: int) -> Iterator[str]:
    """Context parallelism splits a row into one or two chunks per rank, sequence parallelism each
    rank's part.
    """
    p = config.parallelism
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    if cp * tp == 1 or not degrees_fill(config, world):
        return
    chunks = 2 * cp if cp > 1 and p.context_parallel_load_balancer else cp
    unit = math.lcm(chunks, cp * tp)
    for name, seq_len in _seq_lens(config).items():
        if seq_len % unit:
            below = seq_len // unit * unit
            reasons = {
                "parallelism.context_parallel_degree": cp,
                "parallelism.tensor_parallel_degree": tp,
            }
            why = " and ".join(f"{key} {degree}" for key, degree in reasons.items() if degree > 1)
            yield (
                f"{name}.seq_len: {seq_len} can't be split by {why}; it must be a "
                f"multiple of {unit}: "
                f"set it to {' or '.join(str(n) for n in (below, below + unit) if n)}"
            )


def loss_chunks_divide(config: Config, world: int) -> Iterator[str]:
    """Each rank splits its own part of the sequence."""
    p = config.parallelism
    chunks = config.training.loss_chunks
    ranks = p.context_parallel_degree * p.tensor_parallel_degree
    for name, seq_len in _seq_lens(config).items():
        part = seq_len // ranks
        if part % chunks and not seq_len % ranks:
            legal = divisors(part)
            below = max(n for n in legal if n < chunks)
            above = next((n for n in legal if n > chunks), part)
            yield (
                f"training.loss_chunks: {chunks} does not divide the {part} positions of "
                f"{name}.seq_len on each rank; "
                f"set it to {' or '.join(str(n) for n in sorted({below, above}))}"
            )


def _seq_lens(config: Config) -> dict[str, int]:
    """Section to its `seq_len`."""
    return {"training": config.training.seq_len} | (
        {"validation": config.validation.seq_len} if config.validation.enable else {}
    )


def checkpointing_option_is_known(config: Config, world: int) -> Iterator[str]:
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not re.fullmatch(r"0*[1-9][0-9]{0,3}", option):
        yield (
            f"activation_checkpoint.selective_ac_option: got {brief(option)}, must be "
            '"op" or a positive number k '
            "below 10000 (every k-th block)"
        )


def low_precision_blocks_are_full(config: Config, world: int) -> Iterator[str]:
    """Weight gradients sum over the tokens of a rank, in blocks of 32 (MXFP8) or multiples of 16
    (Float8 kernels).
    """
    p = config.parallelism
    training = config.training
    size = (
        p.pipeline_parallel_microbatch_size
        if p.pipeline_parallel_degree > 1
        else training.local_batch_size
    )
    tokens = size * training.seq_len // p.context_parallel_degree
    if uses(config, MX) and tokens % 32:
        yield (
            "model.converters: MXFP8 needs a multiple of 32 tokens per rank and "
            f"microbatch, got {tokens}; set "
            "training.seq_len so that each rank's part is a multiple of 32"
        )
    if uses(config, FLOAT8) and not config.quantize.linear.float8.emulate and tokens % 16:
        yield (
            "model.converters: Float8 needs a multiple of 16 tokens per rank and "
            f"microbatch, got {tokens}; set "
            "training.seq_len so that each rank's part is a multiple of 16"
        )


def schedule_is_named(config: Config, world: int) -> Iterator[str]:
    p = config.parallelism
    if p.pipeline_parallel_degree > 1 and not p.pipeline_parallel_schedule_csv:
        name = p.pipeline_parallel_schedule
        if name.startswith("PipelineSchedule"):
            yield (
                f"parallelism.pipeline_parallel_schedule: {name} runs a schedule from a file; set "
                "parallelism.pipeline_parallel_schedule_csv, or name another schedule"
            )


def features_combine(config: Config, world: int) -> Iterator[str]:
    """The conflicts of `support.py`, which `docs/reference/support-matrix.md` lists."""
    if degrees_fill(config, world):
        yield from (conflict.message for conflict in CONFLICTS if conflict.applies(config))


def storage_is_no_narrower_than_compute(config: Config, world: int) -> Iterator[str]:
    t = config.training
    if t.dtype == "bfloat16" and t.mixed_precision_param == "float32":
        yield (
            'training.dtype = "bfloat16" stores parameters with less precision than '
            "training.mixed_precision_param = "
            '"float32" computes in; set both to bfloat16, or dtype = "float32"'
        )


def profile_fits_its_period(config: Config, world: int) -> Iterator[str]:
    p = config.profiling
    needed = p.profiler_warmup + p.profiler_active
    if p.enable_profiling and needed > p.profile_freq:
        yield (
            f"profiling.profile_freq: {p.profile_freq} steps are fewer than "
            f"profiler_warmup {p.profiler_warmup} + "
            f"profiler_active {p.profiler_active}; set it to {needed} or more"
        )


def worker_options_need_workers(config: Config, world: int) -> Iterator[str]:
    for key in ("training", "validation"):
        loader = getattr(config, key).dataloader
        if loader.persistent_workers and loader.num_workers == 0:
            yield f"{key}.dataloader.persistent_workers needs num_workers of 1 or more"


def data_fails_before_collectives(config: Config, world: int) -> Iterator[str]:
    limit = config.comm.train_timeout_seconds
    for key in ("training", "validation"):
        seconds = getattr(config, key).dataloader.timeout_seconds
        if seconds is not None and seconds >= limit:
            yield (
                f"{key}.dataloader.timeout_seconds: the other ranks' collectives would "
                "time out first, after "
                f"comm.train_timeout_seconds {limit}; set it to {limit / 2:g} instead of "
                f"{seconds:g}, or raise that one"
            )


def guard_can_act(config: Config, world: int) -> Iterator[str]:
    g = config.guard
    c = config.checkpoint
    if g.policy == "rewind" and (not c.enable or c.load_only):
        key = "checkpoint.load_only = false" if c.enable else "checkpoint.enable = true"
        yield (
            f'guard.policy: "rewind" goes back to a checkpoint of this run; set {key}, or '
            'guard.policy = "skip"'
        )
    if 0 < g.straggler_factor <= 1:
        yield (
            f"guard.straggler_factor: {g.straggler_factor:g} would report ranks of "
            "median speed; set it above 1, for "
            "example 1.3, or to 0 (off)"
        )


def warn_only_needs_determinism(config: Config, world: int) -> Iterator[str]:
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        yield "debug.deterministic_warn_only has no effect without debug.deterministic = true"


def validation_sees_data(config: Config, world: int) -> Iterator[str]:
    v = config.validation
    if not v.enable:
        return
    advice = "0 batches give no loss; set -1 for the whole data set"
    if v.steps == 0 and any(one.steps is None for one in v.sets or [ValidationSet(name="")]):
        yield f"validation.steps: {advice}, or validation.enable = false"
    for one in v.sets:
        if one.steps == 0:
            yield f"validation.sets: {brief(one.name)}: steps: {advice}, or remove the set"
    if v.global_batch_size == 0:
        yield (
            "validation.global_batch_size: 0 rows give no loss; set 1 or more, or -1 for the "
            "default"
        )


def validation_sets_are_distinct(config: Config, world: int) -> Iterator[str]:
    v = config.validation
    names = [one.name for one in v.sets]
    for name in {name for name in names if not name or names.count(name) > 1}:
        yield (
            f"validation.sets: {brief(name)} names {names.count(name)} sets; give each a "
            "name of its own"
        )
    single = {key: getattr(v, key) for key in ("dataset", "dataset_path", "text_column")}
    for key in single if v.sets else ():
        if single[key] != getattr(Validation(), key):
            yield (
                f"validation.{key} and validation.sets can't both be set; move {key} to a "
                "[[validation.sets]] table"
            )


def datasets_are_known(config: Config, world: int) -> Iterator[str]:
    """With a path, the name of a data set is only a name."""
    t = config.training
    v = config.validation
    named: list[tuple[str, Training | Source | Validation | ValidationSet]] = [
        ("training.dataset", t)
    ]
    named += [(f"training.sources: {brief(source.name)}: dataset", source) for source in t.sources]
    if v.enable:
        named += [(f"validation.sets: {brief(one.name)}: dataset", one) for one in v.sets]
        named += [] if v.sets else [("validation.dataset", v)]
    for key, data in named:
        if data.dataset_path is None and (problem := unknown_dataset(data.dataset)):
            yield f"{key}: {problem}"


def evals_have_tasks(config: Config, world: int) -> Iterator[str]:
    if config.eval.enable and not config.eval.tasks:
        yield "eval.tasks: eval.enable = true needs the name of at least one task"


def average_has_a_use(config: Config, world: int) -> Iterator[str]:
    ema = config.ema
    c = config.checkpoint
    steps = config.training.steps
    for key in ("validation", "export"):
        if getattr(ema, key) and not ema.enable:
            yield f"ema.{key} has no effect without ema.enable = true"
    if ema.validation and not config.validation.enable:
        yield "ema.validation has no effect without validation.enable = true"
    if ema.export and not (c.enable and (c.last_save_model_only or c.last_save_in_hf)):
        yield (
            "ema.export: nothing is exported; set checkpoint.enable = true, and "
            "checkpoint.last_save_model_only or "
            "last_save_in_hf, or ema.export = false (`torchtitan ckpt to-hf --ema` "
            "exports any step)"
        )
    if ema.enable and ema.start_step > steps:
        yield (
            f"ema.start_step: {ema.start_step} is after the last step; set it to at most "
            f"training.steps {steps}"
        )


def metrics_are_served(config: Config, world: int) -> Iterator[str]:
    own = config.metrics.prometheus
    chosen = "prometheus" in config.metrics.sinks
    if not chosen and own != Prometheus():
        yield '[metrics.prometheus] has no effect without "prometheus" in metrics.sinks'
    if chosen and not own.port and not own.textfile:
        yield (
            "metrics.prometheus: with port 0 and no textfile, nothing can read the metrics; "
            "set one of them"
        )
    if own.textfile and not own.textfile.endswith(".prom"):
        yield (
            f"metrics.prometheus.textfile: {brief(own.textfile)} must end in .prom, or "
            "node_exporter doesn't read it"
        )


def notifications_have_a_receiver(config: Config, world: int) -> Iterator[str]:
    own = config.notifications
    if own != Notifications() and not own.webhook_env and not own.command:
        yield "[notifications] has no effect without webhook_env or command; set one of them"


RULES: tuple[Callable[[Config, int], Iterator[str]], ...] = (
    degrees_fill_the_world,
    expert_degree_divides,
    batch_divides,
    elastic_run_can_resume,
    sequence_divides,
    loss_chunks_divide,
    checkpointing_option_is_known,
    low_precision_blocks_are_full,
    schedule_is_named,
    features_combine,
    storage_is_no_narrower_than_compute,
    lr_schedule.keys_agree,
    *checkpoints.RULES,
    profile_fits_its_period,
    worker_options_need_workers,
    data_fails_before_collectives,
    guard_can_act,
    warn_only_needs_determinism,
    validation_sees_data,
    average_has_a_use,
    metrics_are_served,
    notifications_have_a_receiver,
    validation_sets_are_distinct,
    evals_have_tasks,
    datasets_are_known,
    *mixtures.RULES,
)


def validate(config: Config, world: int, sources: dict[str, str] | None = None) -> None:
    """Check a derived configuration for `world` ranks.

    Args:
        sources: key to where it was set, named in the messages.

    Raises:
        ConfigError: every broken rule.
    """
    problems = [problem for rule in RULES for problem in rule(config, world)]
    if problems:
        raise ConfigError([_with_place(problem, sources or {}) for problem in problems])


def _with_place(problem: str, sources: dict[str, str]) -> str:
    """The problem, preceded by where the first key in it that isn't at its default was set."""
    key = next((word for word in re.findall(r"[\w.]+", problem) if word in sources), "")
    where = sources.get(key)
    return f"{where}: {problem}" if where and where != f"--{key}" else problem
