"""Pipeline stages: their modules, their ranks, and whether the schedule can run them. Imports no
torch.

A stage is a list of consecutive modules. Depending on the schedule, stages are assigned to the
ranks of the `pp` axis round-robin (stage 0 to rank 0, stage 1 to rank 1, ..., then rank 0 again) or
in a V (back from the last rank).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torchtitan.config.derive import divisors
from torchtitan.config.sections.schema import Config
from torchtitan.parallel.pipeline_csv import Action, order_problems, read_orders
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.text import brief, listed

_P = "parallelism.pipeline_parallel"


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: its name in `torch.distributed.pipelining`, and what it requires."""

    name: str
    stages_per_rank: Literal["one", "several", "two"]
    whole_rounds: bool = False
    """It runs the microbatches in n // pp rounds of equal size."""
    fills_stages: bool = False
    """It needs at least as many microbatches as stages."""

    @property
    def v_shaped(self) -> bool:
        return self.stages_per_rank == "two"


SCHEDULES = {
    "GPipe": Schedule("GPipe", "one"),
    "1F1B": Schedule("1F1B", "one", fills_stages=True),
    "Interleaved1F1B": Schedule("Interleaved1F1B", "several", whole_rounds=True),
    "FlexibleInterleaved1F1B": Schedule("Interleaved1F1B", "several", whole_rounds=True),
    "LoopedBFS": Schedule("LoopedBFS", "several"),
    "InterleavedZeroBubble": Schedule("InterleavedZeroBubble", "several", whole_rounds=True),
    "ZBVZeroBubble": Schedule("ZBVZeroBubble", "two"),
    "DualPipeV": Schedule("DualPipeV", "two", fills_stages=True),
    "PipelineScheduleSingle": Schedule(
        "PipelineScheduleSingle", "one"
    ),  # needs a CSV file, like the next
    "PipelineScheduleMulti": Schedule("PipelineScheduleMulti", "several"),
}
"""By their name in the configuration. torch merged FlexibleInterleaved1F1B into Interleaved1F1B."""


@dataclass(frozen=True)
class PipelineStages:
    """A pipeline, checked."""

    modules: tuple[tuple[str, ...], ...]
    """Names of each stage's modules."""
    ranks: tuple[int, ...]
    """Each stage's rank along `pp`."""
    schedule: str | None
    """Name of the schedule in torch; None if `csv_file` holds it."""
    csv_file: str | None
    microbatch_size: int

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]


def pipeline_stages(
    config: Config, flops: Mapping[str, float], tied: Sequence[str]
) -> PipelineStages | None:
    """The pipeline of `config`; None without pipeline parallelism.

    Args:
        flops: FLOPs per token of each module that can be on its own stage, in execution order.
        tied: modules that share a weight.

    Raises:
        ConfigError: every reason why it can't run, with the legal choices.
    """
    p = config.parallelism
    degree = p.pipeline_parallel_degree
    if degree == 1:
        return None
    problems: list[str] = []
    if tied:
        problems.append(
            f"{_P}_degree: {config.model.flavor} shares one weight between "
            f"{' and '.join(tied)}, which would be on "
            "different stages; untie them ([model.overrides] tie_embeddings = false), or "
            "set the degree to 1"
        )
    size = p.pipeline_parallel_microbatch_size
    schedule = SCHEDULES[p.pipeline_parallel_schedule]
    orders: list[list[Action]] | None = None
    if p.pipeline_parallel_schedule_csv:
        orders, wrong = read_orders(p.pipeline_parallel_schedule_csv, degree)
        if wrong:  # a file that can't be read says nothing about stages or microbatches
            raise ConfigError([*problems, *wrong])
    modules, wrong = _split(config, flops, schedule, orders)
    problems += wrong
    problems += _microbatch_problems(config, schedule, len(modules), orders)
    if orders is not None and not problems:
        problems += order_problems(p.pipeline_parallel_schedule_csv or "", orders, len(modules))
    if problems:
        raise ConfigError(problems)
    if orders is not None:
        owner = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        ranks = tuple(owner[stage] for stage in range(len(modules)))
        return PipelineStages(modules, ranks, None, p.pipeline_parallel_schedule_csv, size)
    ranks = tuple(_rank_of(stage, degree, schedule.v_shaped) for stage in range(len(modules)))
    return PipelineStages(modules, ranks, schedule.name, None, size)


def _rank_of(stage: int, degree: int, v_shaped: bool) -> int:
    return 2 * degree - 1 - stage if v_shaped and stage >= degree else stage % degree


# ---- modules of each stage


def _split(
    config: Config,
    flops: Mapping[str, float],
    schedule: Schedule,
    orders: list[list[Action]] | None,
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    p = config.parallelism
    names = list(flops)
    layers = [name for name in flops if name.startswith("layers.")]
    if p.module_fqns_per_model_part:
        modules, problems = _given_parts(p.module_fqns_per_model_part, names)
        count = len(modules)
        key = "parallelism.module_fqns_per_model_part"
        if problems:
            return modules, problems
    else:
        modules = ()
        problems = []
        count, key = _stage_count(config, len(layers), schedule, orders)
    problems += _count_problems(count, key, p.pipeline_parallel_degree, schedule, orders)
    if problems or modules:
        return modules, problems
    by_layers = (p.pipeline_parallel_layers_per_stage, *_less_layers(config)) != (None, None, None)
    if by_layers:
        return _by_layer_count(names, layers, count, *_less(config))
    if count > (most := _most_stages(flops)):
        return (), [
            f"{key}: {count} stages for {len(layers)} layers; at most {most} are "
            "possible, embedding and output being "
            f"alone on theirs; lower {_P}_degree, or choose a schedule with fewer stages"
        ]
    return balanced(flops, count), []


def _less_layers(config: Config) -> tuple[int | None, int | None]:
    p = config.parallelism
    return p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers


def _less(config: Config) -> tuple[int, int]:
    """How many layers the embedding and the output count as."""
    first, last = _less_layers(config)
    return (1 if first is None else first), (1 if last is None else last)


def _stage_count(
    config: Config,
    n_layers: int,
    schedule: Schedule,
    orders: list[list[Action]] | None,
) -> tuple[int, str]:
    p = config.parallelism
    if orders is not None:
        stages = {action.stage for order in orders for action in order}
        return max(stages, default=0) + 1, f"{_P}_schedule_csv"
    if per_stage := p.pipeline_parallel_layers_per_stage:
        return math.ceil((n_layers + sum(_less(config))) / per_stage), f"{_P}_layers_per_stage"
    return p.pipeline_parallel_degree * (
        1 if schedule.stages_per_rank == "one" else 2
    ), f"{_P}_degree"


def _count_problems(
    count: int,
    key: str,
    degree: int,
    schedule: Schedule,
    orders: list[list[Action]] | None,
) -> Iterator[str]:
    if orders is not None:
        stages = {action.stage for order in orders for action in order}
        if key.endswith("module_fqns_per_model_part") and len(stages) != count:
            yield f"{key}: {count} stages, but the schedule of {_P}_schedule_csv has {len(stages)}"
        return
    legal = {
        "one": f"1 stage per rank ({degree} stages)",
        "several": f"2 or more stages per rank ({2 * degree}, {3 * degree}, ... stages)",
        "two": f"2 stages per rank ({2 * degree} stages)",
    }[schedule.stages_per_rank]
    per_rank, rest = divmod(count, degree)
    fits = {
        "one": per_rank == 1,
        "several": per_rank >= 2,
        "two": per_rank == 2,
    }[schedule.stages_per_rank]
    if rest or not fits:
        yield (
            f"{key}: gives {count} stages on {degree} ranks, but schedule {schedule.name} "
            f"takes {legal}"
        )


def _given_parts(
    parts: Sequence[Any], names: list[str]
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """Stages as the user lists them: each one's modules, or a flat list of the modules that start a
    new stage.
    """
    key = "parallelism.module_fqns_per_model_part"
    position = {name: index for index, name in enumerate(names)}
    if all(isinstance(part, str) for part in parts):
        unknown = [name for name in parts if name not in position]
        if unknown:
            return (), [
                f"{key}: no module {brief(unknown[0])}; the model has {names[0]}, "
                f"{names[1]} ... {names[-1]}"
            ]
        cuts = [position[name] for name in parts]
        if sorted(set(cuts)) != cuts or cuts[0] == 0:
            return (), [
                f"{key}: the modules that start a stage must be in the model's order, "
                f"after {names[0]}"
            ]
        return tuple(tuple(names[a:b]) for a, b in itertools.pairwise([0, *cuts, len(names)])), []
    flat = [name for part in parts for name in part]
    problems = []
    stages = Counter(flat)
    for name, count in stages.items():
        if name not in position:
            problems.append(
                f"{key}: no module {brief(name)}; the model has {names[0]}, {names[1]} "
                f"... {names[-1]}"
            )
        elif count > 1:
            problems.append(f"{key}: {name} is on {count} stages")
    problems += [f"{key}: {name} is on no stage" for name in names if name not in stages]
    if not problems and flat != names:
        first = next(a for a, b in zip(flat, names, strict=True) if a != b)
        problems.append(f"{key}: {first} is out of order; stages run in the model's order")
    if not all(parts):
        problems.append(f"{key}: a stage without modules")
    return tuple(map(tuple, parts)), problems


def _by_layer_count(
    names: list[str],
    layers: list[str],
    count: int,
    first_less: int,
    last_less: int,
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """Equal numbers of layers, with this many fewer on the first and the last stage.

    Either may have none: the first then holds the embedding alone, the last norm and output.
    """
    base, extra = divmod(len(layers) + first_less + last_less, count)
    sizes = [base + (i < extra) for i in range(count)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    if min(sizes) < 0 or 0 in sizes[1:-1]:
        advice = "lower them" if min(sizes) < 0 else "raise them, or use fewer stages"
        return (), [
            f"{_P}_first/last_stage_less_layers: {len(layers)} layers on {count} stages "
            f"with {first_less} and "
            f"{last_less} fewer at the ends leave a stage empty ({listed(sizes)}); {advice}"
        ]
    cuts = list(itertools.accumulate(sizes))
    start = names.index(layers[0])
    stop = names.index(layers[-1]) + 1
    bounds = [0, *(start + cut for cut in cuts[:-1]), len(names)]
    assert stop == start + cuts[-1]
    return tuple(tuple(names[a:b]) for a, b in itertools.pairwise(bounds)), []


def balanced(flops: Mapping[str, float], count: int) -> tuple[tuple[str, ...], ...]:
    """Split modules into `count` stages, minimizing the cost of the slowest, then the sum of
    squares of all.

    Modules that cost nothing (embedding, norm) stay with the next one that does. Only if there are
    too few of those for `count` stages, the embedding is alone on the first.
    """
    return _balanced(tuple(flops.items()), count)


def _most_stages(flops: Mapping[str, float]) -> int:
    """How many stages `balanced` can make."""
    costs = list(flops.values())
    return sum(cost > 0 for cost in costs) + (costs[0] == 0)


def _units(flops: tuple[tuple[str, float], ...], count: int) -> tuple[list[list[str]], list[float]]:
    """The smallest parts that stages consist of, at least `count`, and their costs."""
    units: list[list[str]] = []
    costs: list[float] = []
    waiting: list[str] = []
    for name, cost in flops:
        waiting.append(name)
        if cost:
            units.append(waiting)
            costs.append(cost)
            waiting = []
    units[-1] += waiting
    if len(units) < count:
        first, *rest = units
        units = [first[:-1], first[-1:], *rest]
        costs = [0.0, *costs]
    return units, costs


@cache  # a search asks for the same split thousands of times
def _balanced(flops: tuple[tuple[str, float], ...], count: int) -> tuple[tuple[str, ...], ...]:
    units, costs = _units(flops, count)
    sums = [0.0, *itertools.accumulate(costs)]
    limit = _least_maximum(costs, count)
    # best[k][i]: the least sum of squares of k stages, each within `limit`, that hold the first i
    # units.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(count):
        row: dict[int, tuple[float, int]] = {}
        for begin, (before, _) in best[-1].items():
            for end in range(begin + 1, len(units) - (count - stage - 1) + 1):
                cost = sums[end] - sums[begin]
                if cost > limit * (1 + 1e-9):
                    break
                if end not in row or before + cost**2 < row[end][0]:
                    row[end] = (before + cost**2, begin)
        best.append(row)
    cuts = [len(units)]
    for stage in range(count, 0, -1):
        cuts.append(best[stage][cuts[-1]][1])
    return tuple(tuple(itertools.chain(*units[a:b])) for a, b in itertools.pairwise(reversed(cuts)))


def _least_maximum(costs: list[float], count: int) -> float:
    """The smallest possible cost of the most expensive stage, within a relative error of 1e-10."""

    def fits(limit: float) -> bool:
        stages = 1
        total = 0.0
        for cost in costs:
            if total + cost > limit * (1 + 1e-9):
                stages = stages + 1
                total = 0.0
            total += cost
        return stages <= count

    low = max(costs)
    high = sum(costs)
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


# ---- microbatches


def _microbatch_problems(
    config: Config,
    schedule: Schedule,
    stages: int,
    orders: list[list[Action]] | None,
) -> Iterator[str]:
    p = config.parallelism
    size = p.pipeline_parallel_microbatch_size
    sections = {"training": config.training.local_batch_size}
    if config.validation.enable:
        sections["validation"] = config.validation.local_batch_size
    for section, rows in sections.items():
        if rows % size:
            yield (
                f"{_P}_microbatch_size: {size} does not divide {section}.local_batch_size {rows}; "
                f"set it to one of {listed(divisors(rows))}"
            )
    rows = config.training.local_batch_size
    if rows % size or not stages:
        return
    if orders is not None:
        wanted = len({action.microbatch for order in orders for action in order})
        if rows != wanted * size:
            yield (
                f"{_P}_schedule_csv: the schedule has {wanted} microbatches, but "
                f"training.local_batch_size {rows} / "
                f"{_P}_microbatch_size {size} is {rows // size}; set "
                f"training.local_batch_size = {wanted * size}"
            )
        return
    reason = _reason_against(schedule, rows // size, stages, p.pipeline_parallel_degree)
    if reason:
        fitting = [
            d
            for d in divisors(rows)
            if not _reason_against(schedule, rows // d, stages, p.pipeline_parallel_degree)
        ]
        if fitting:
            advice = f"set {_P}_microbatch_size to {' or '.join(map(str, fitting[:8]))}"
        else:
            more = next(
                n
                for n in itertools.count(stages)
                if not _reason_against(schedule, n, stages, p.pipeline_parallel_degree)
            )
            advice = f"raise training.local_batch_size to {more * size}"
        yield f"{_P}_schedule: {schedule.name} {reason}; {advice}"


def _reason_against(
    schedule: Schedule,
    microbatches: int,
    stages: int,
    degree: int,
) -> str | None:
    rounds = max(1, microbatches // degree)
    if schedule.whole_rounds and microbatches % rounds:
        return f"can't run {microbatches} microbatches on {degree} ranks in {rounds} equal rounds"
    if schedule.fills_stages and microbatches < stages:
        return f"needs at least as many microbatches as its {stages} stages, got {microbatches}"
    return None
