"""Rules on degrees and the sizes they divide: ranks, batches, sequences, sizes of the model."""

import math
from bisect import bisect
from collections.abc import Iterator, Mapping

from torchtitan.config.derive import (
    DEGREE_KEYS,
    axis_degrees,
    data_parallel_degree,
    divisors,
    expert_ranks,
    expert_shard_dim,
    ranks_of,
    rows_of,
)
from torchtitan.config.pipeline_schedules import splits_backward
from torchtitan.config.rules.table import ABSENT, Facts, rule
from torchtitan.config.sections.schema import Config
from torchtitan.config.sections.training import MoE
from torchtitan.utils.wording import listed


def multiples_near(number: int, unit: int) -> str:
    """The positive multiples of `unit` around `number`, as advice."""
    below = number // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n > 0)


@rule(*(f"parallelism.{key}" for key in DEGREE_KEYS.values()))
def degrees_fill_the_world(config: Config, facts: Facts) -> Iterator[str]:
    shard_key = "parallelism.data_parallel_shard_degree"
    world = facts.world
    degrees = axis_degrees(config.parallelism)
    if degrees["dp_shard"] == 0:
        yield f"{shard_key}: got 0; set 1 for no sharding, or -1 for all ranks left"
        return
    if ranks_of(config) == world:
        return
    active_degrees = {
        f"parallelism.{DEGREE_KEYS[axis]}": degree
        for axis, degree in degrees.items()
        if degree > 1 or axis == "dp_shard"
    }
    ranks = math.prod(degrees.values())
    others = ranks // degrees["dp_shard"]
    if world % others == 0:
        advice = f"set data_parallel_shard_degree = {world // others}"
    elif len(active_degrees) == 2:
        (key,) = active_degrees.keys() - {shard_key}
        advice = f"{key} must divide {world}: {listed(divisors(world))}"
    else:
        advice = (
            f"the product of the degrees other than data_parallel_shard_degree, {others}, must "
            f"divide {world}"
        )
    product = " x ".join(f"{key} {degree}" for key, degree in active_degrees.items())
    yield f"{product} is {ranks}, but the number of ranks is {world}; {advice}"


@rule("parallelism.expert_parallel_degree", needs=["layout"])
def expert_degree_divides(config: Config, facts: Facts) -> Iterator[str]:
    p = config.parallelism
    degree = p.expert_parallel_degree
    ranks = expert_ranks(p)
    if ranks % degree:
        yield (
            f"parallelism.expert_parallel_degree: {degree} does not divide "
            f"data_parallel_shard_degree {p.data_parallel_shard_degree} x context_parallel_degree "
            f"{p.context_parallel_degree} x tensor_parallel_degree {p.tensor_parallel_degree} = "
            f"{ranks}, whose ranks it shares; set it to one of {listed(divisors(ranks))}"
        )


@rule("training.global_batch_size", "training.local_batch_size", needs=["layout"])
def batch_divides(config: Config, facts: Facts) -> Iterator[str]:
    t = config.training
    dp = data_parallel_degree(config)
    unit = t.local_batch_size * dp
    rows = t.global_batch_size
    if config.fault_tolerance.elastic or (rows > 0 and rows % unit == 0):
        return
    yield (
        f"training.global_batch_size: {rows} is not a multiple of local_batch_size "
        f"{t.local_batch_size} x data-parallel degree {dp} = {unit}; set it to "
        f"{multiples_near(rows, unit)}"
    )


@rule("fault_tolerance.elastic", "training.global_batch_size", "checkpoint.enable")
def elastic_run_can_resume(config: Config, facts: Facts) -> Iterator[str]:
    """A restart on other ranks must continue the same run, with the same command."""
    if not config.fault_tolerance.elastic:
        return
    c = config.checkpoint
    batch = config.training.global_batch_size
    dp = data_parallel_degree(config)
    why = "fault_tolerance.elastic"
    if batch <= 0:
        yield (
            f"training.global_batch_size: {why} keeps it fixed on any number of ranks; set it to "
            f"{dp} or more"
        )
    elif ranks_of(config) == facts.world and batch < dp:
        yield (
            f"training.global_batch_size: {batch} rows are too few for {dp} data-parallel ranks; "
            f"set {dp} or more"
        )
    if not c.enable or c.load_only:
        yield (
            f"checkpoint.enable: {why} resumes from checkpoints; set enable = true and load_only "
            "= false"
        )
    if c.exclude_from_loading:
        yield (
            f"checkpoint.exclude_from_loading: with {why} every restart would lose these parts; "
            "set []"
        )


@rule("training.seq_len", "validation.seq_len", needs=["layout"])
def sequence_divides(config: Config, facts: Facts) -> Iterator[str]:
    """Context parallelism splits a row into one or two chunks per rank, sequence parallelism each
    rank's part.
    """
    p = config.parallelism
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    if cp * tp == 1:
        return
    chunks = 2 * cp if cp > 1 and p.context_parallel_load_balancer else cp
    unit = math.lcm(chunks, cp * tp)
    reasons = {"parallelism.context_parallel_degree": cp, "parallelism.tensor_parallel_degree": tp}
    why = " and ".join(f"{key} {degree}" for key, degree in reasons.items() if degree > 1)
    sizes = {} if facts.tensor_parallel_sizes is ABSENT else facts.tensor_parallel_sizes
    is_illegal = any(size % tp for size in sizes.values())
    for name, seq_len in rows_of(config, "seq_len").items():
        if seq_len % unit:
            advice = (
                "choose it once that degree divides the model"
                if is_illegal
                else f"it must be a multiple of {unit}: set it to {multiples_near(seq_len, unit)}"
            )
            yield f"{name}.seq_len: {seq_len} can't be split by {why}; {advice}"


@rule("training.loss_chunks")
def loss_chunks_divide(config: Config, facts: Facts) -> Iterator[str]:
    """Each rank splits its own part of the sequence."""
    p = config.parallelism
    chunks = config.training.loss_chunks
    ranks = p.context_parallel_degree * p.tensor_parallel_degree
    for name, seq_len in rows_of(config, "seq_len").items():
        positions = seq_len // ranks
        if positions % chunks and not seq_len % ranks:
            legal = divisors(positions)
            index = bisect(legal, chunks)
            near = " or ".join(map(str, legal[index - 1 : index + 1]))
            yield (
                f"training.loss_chunks: {chunks} does not divide the {positions} positions of "
                f"{name}.seq_len on each rank; set it to {near}"
            )


@rule("parallelism.tensor_parallel_degree", needs=["tensor_parallel_sizes"])
def tensor_parallel_degree_divides(config: Config, facts: Facts) -> str | None:
    degree = config.parallelism.tensor_parallel_degree
    sizes = facts.tensor_parallel_sizes
    misfits = [f"{name} {size}" for name, size in sizes.items() if size % degree]
    if not misfits:
        return None
    return (
        f"parallelism.tensor_parallel_degree: {degree} does not divide {', '.join(misfits)} of "
        f"model.flavor {config.model.flavor}; set it to one of "
        f"{listed(divisors(math.gcd(*sizes.values())))}"
    )


@rule(
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    needs=["context_parallel_sizes"],
)
def context_parallel_degree_divides(config: Config, facts: Facts) -> str | None:
    """Layers whose ranks exchange heads give each rank whole rows of some heads."""
    p = config.parallelism
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    sizes = facts.context_parallel_sizes
    misfits = [f"{name} {size}" for name, size in sizes.items() if size % (cp * tp)]
    if cp == 1 or not misfits:
        return None
    divisor = math.gcd(*sizes.values())
    product = f"{cp} x parallelism.tensor_parallel_degree {tp} = {cp * tp}" if tp > 1 else str(cp)
    # If only 1 is left, another rule reports the legal tensor-parallel degrees.
    legal = [1] if divisor % tp else divisors(divisor // tp)
    return (
        f"parallelism.context_parallel_degree: {product} does not divide {', '.join(misfits)} of "
        f"{model_name(config)}, whose ranks exchange heads; set it to one of {listed(legal)}"
    )


@rule(
    "parallelism.context_parallel_method",
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    needs=["tensor_parallel_sizes"],
)
def attention_heads_divide(config: Config, facts: Facts) -> str | None:
    """Ulysses gives each rank whole rows of some heads. A key head can go to several ranks."""
    p = config.parallelism
    cp = p.context_parallel_degree
    tp = p.tensor_parallel_degree
    sizes = facts.tensor_parallel_sizes
    if cp == 1 or p.context_parallel_method != "ulysses" or "n_heads" not in sizes:
        return None
    heads = sizes["n_heads"] // tp
    keys = sizes.get("n_kv_heads", sizes["n_heads"]) // tp
    legal = [n for n in divisors(heads) if keys and (keys % n == 0 or n % keys == 0)]
    if cp in legal or not legal:  # without any, another rule refuses the tensor-parallel degree
        return None
    return (
        f"parallelism.context_parallel_method: ulysses can't split the {heads} query heads and "
        f"{keys} key heads of a rank of {model_name(config)} over context_parallel_degree {cp} "
        f'ranks; set it to one of {listed(legal)}, or context_parallel_method = "ring"'
    )


@rule("parallelism.expert_parallel_degree", "moe", needs=["expert_sizes"])
def dense_models_have_no_experts(config: Config, facts: Facts) -> Iterator[str]:
    if facts.expert_sizes:
        return
    model = model_name(config)
    if config.parallelism.expert_parallel_degree > 1:
        yield f"parallelism.expert_parallel_degree: {model} has no experts; set it to 1"
    if config.moe != MoE():
        yield f"[moe]: {model} has no experts; remove the section"


@rule("parallelism.pipeline_parallel_schedule", needs=["expert_sizes", "old_torch"])
def experts_can_split_their_backward(config: Config, facts: Facts) -> str | None:
    if not (facts.expert_sizes and facts.old_torch and splits_backward(config.parallelism)):
        return None
    return (
        "parallelism.pipeline_parallel_schedule: with torch before 2.13, the backward of experts "
        "can't run in the two parts that this schedule needs; upgrade torch, or set Interleaved1F1B"
    )


@rule("parallelism.expert_parallel_degree", needs=["expert_sizes"])
def experts_divide(config: Config, facts: Facts) -> str | None:
    """Whole experts are split over the expert-parallel ranks, and FSDP shards each rank's."""
    if not facts.expert_sizes:
        return None
    p = config.parallelism
    key = "parallelism.expert_parallel_degree"
    degree = p.expert_parallel_degree
    ranks = expert_ranks(p)
    (name, count), *widths = facts.expert_sizes.items()
    legal = divisors(math.gcd(count, ranks))
    if count % degree:
        return (
            f"{key}: {degree} does not divide {name} {count} of {model_name(config)}; set it to "
            f"one of {listed(legal)}"
        )
    if _fsdp_divides(degree, facts.expert_sizes, ranks):
        return None
    shardable = [n for n in legal if _fsdp_divides(n, facts.expert_sizes, ranks)]
    width_texts = " nor ".join(f"{name} {width}" for name, width in widths)
    return (
        f"{key}: with {degree}, FSDP shards {count // degree} experts over {ranks // degree} "
        f"ranks, which divide neither their number nor {width_texts}; set it to one of "
        f"{listed(shardable)}"
    )


def model_name(config: Config) -> str:
    """The model in messages."""
    return f"model.flavor {config.model.flavor} of {config.model.name}"


def _fsdp_divides(degree: int, sizes: Mapping[str, int], ranks: int) -> bool:
    """Whether FSDP can shard evenly the experts that each of `degree` ranks has."""
    count, *widths = sizes.values()
    shards = ranks // degree
    if shards < 1 or ranks % degree:  # other rules report it
        return True
    if degree == 1 or expert_shard_dim(count // degree, shards) == 0:
        return True
    return not any(width % shards for width in widths)
