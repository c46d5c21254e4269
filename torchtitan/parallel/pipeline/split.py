"""Split a model into pipeline stages, and assign them to ranks. Imports no torch.

A stage is a list of consecutive modules. Depending on the schedule, stages are assigned to the
ranks of the `pp` axis round-robin (stage 0 to rank 0, stage 1 to rank 1, ..., then rank 0 again) or
in a V (back from the last rank). `config/rules/pipeline.py` refuses pipelines that can't run.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torchtitan.config.pipeline_schedules import schedule_of
from torchtitan.config.rules import Facts, check
from torchtitan.config.rules.pipeline import (
    layers_of,
    layers_per_stage,
    splits_by_layers,
    stage_count,
    stage_modules,
)
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.config.sections.schema import Config
from torchtitan.parallel.pipeline.schedules import schedule_file


@dataclass(frozen=True)
class PipelinePlan:
    """A checked pipeline: the modules and the rank of each stage, and its schedule."""

    modules: tuple[tuple[str, ...], ...]
    """Names of each stage's modules."""
    ranks: tuple[int, ...]
    """Each stage's rank along `pp`."""
    schedule: str | None
    """Name in `config.pipeline_schedules.SCHEDULES`; None if `csv_file` holds it."""
    csv_file: str | None
    microbatch_size: int

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]


def pipeline_stages(
    config: Config, flops: Mapping[str, float], tied: Sequence[str]
) -> PipelinePlan | None:
    """The pipeline of `config`; None without pipeline parallelism.

    Args:
        flops: FLOPs per token of each module that can be on its own stage, in execution order.
        tied: modules that share a weight.

    Raises:
        ConfigError: every reason why it can't run, with the legal choices.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return None
    file = schedule_file(config)
    facts = Facts(module_flops=flops, tied_modules=tied, schedule_file=file)
    check(config, facts)
    return assign_stages(config, facts)


def assign_stages(config: Config, facts: Facts) -> PipelinePlan | None:
    """The pipeline of a checked configuration; None without pipeline parallelism."""
    p = config.parallelism
    degree = p.pipeline_parallel_degree
    if degree == 1:
        return None
    modules = tuple(_split(p, facts))
    size = p.pipeline_parallel_microbatch_size
    if facts.schedule_file is not None:
        csv_file = p.pipeline_parallel_schedule_csv
        return PipelinePlan(modules, facts.schedule_file.ranks, None, csv_file, size)
    v_shaped = schedule_of(p).v_shaped
    ranks = tuple(_rank_of(stage, degree, v_shaped) for stage in range(len(modules)))
    return PipelinePlan(modules, ranks, p.pipeline_parallel_schedule, None, size)


def _rank_of(stage: int, degree: int, v_shaped: bool) -> int:
    return 2 * degree - 1 - stage if v_shaped and stage >= degree else stage % degree


# ---- modules of each stage


def _split(p: Parallelism, facts: Facts) -> Sequence[tuple[str, ...]]:
    if p.module_fqns_per_model_part:
        return [tuple(names) for names in stage_modules(p.module_fqns_per_model_part, facts)]
    count, _ = stage_count(p, facts)
    if not splits_by_layers(p):
        return balance_stages(facts.module_flops, count)
    names = list(facts.module_flops)
    layers = layers_of(facts)
    ends = itertools.accumulate(layers_per_stage(p, len(layers), count))
    # The final norm comes before the modules of multi-token prediction, and stays with them.
    cuts = [names.index(layers[end - 1]) + 1 if end else names.index(layers[0]) for end in ends]
    bounds = [0, *cuts[:-1], len(names)]
    return [tuple(names[a:b]) for a, b in itertools.pairwise(bounds)]


def balance_stages(flops: Mapping[str, float], count: int) -> tuple[tuple[str, ...], ...]:
    """Split modules into `count` stages, minimizing the cost of the slowest, then the sum of
    squares of all.

    Modules that cost nothing (embedding, norm) stay with the next module that does. Only if fewer
    than `count` modules cost anything, the embedding is alone on the first stage.
    """
    return _balance(tuple(flops.items()), count)


def _units(flops: tuple[tuple[str, float], ...], count: int) -> tuple[list[list[str]], list[float]]:
    """The smallest units that stages consist of, at least `count`, and their costs."""
    units: list[list[str]] = []
    costs: list[float] = []
    unit: list[str] = []
    for name, cost in flops:
        unit.append(name)
        if cost:
            units.append(unit)
            costs.append(cost)
            unit = []
    units[-1] += unit
    if len(units) < count:
        first, *others = units
        units = [first[:-1], first[-1:], *others]
        costs = [0.0, *costs]
    return units, costs


@cache  # a search asks for the same split thousands of times
def _balance(flops: tuple[tuple[str, float], ...], count: int) -> tuple[tuple[str, ...], ...]:
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
                stages += 1
                total = 0.0
            total += cost
        return stages <= count

    low = max(costs)
    high = sum(costs)
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
