"""Rules on pipelines: how a model can be cut into stages, and what each schedule can run."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan.config.derive import divisors, rows_of
from torchtitan.config.pipeline_schedules import Schedule, schedule_of
from torchtitan.config.rules.table import Facts, rule
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.config.sections.schema import Config
from torchtitan.utils.wording import brief, listed

_P = "parallelism.pipeline_parallel"
_MODULE_LISTS = "parallelism.module_fqns_per_model_part"


# ---- shapes that a configuration asks for


def stage_count(p: Parallelism, facts: Facts) -> tuple[int, str]:
    """Number of pipeline stages, and the key that sets it."""
    if p.module_fqns_per_model_part:
        return len(stage_modules(p.module_fqns_per_model_part, facts)), _MODULE_LISTS
    if facts.schedule_file is not None:
        return len(facts.schedule_file.ranks), f"{_P}_schedule_csv"
    if p.pipeline_parallel_layers_per_stage:
        size = len(layers_of(facts)) + sum(less_layers(p))
        return math.ceil(size / p.pipeline_parallel_layers_per_stage), f"{_P}_layers_per_stage"
    return p.pipeline_parallel_degree * schedule_of(p).default_stages, f"{_P}_degree"


def layers_of(facts: Facts) -> list[str]:
    """Names of the model's blocks."""
    return [name for name in facts.module_flops if name.startswith("layers.")]


def splits_by_layers(p: Parallelism) -> bool:
    """Whether stages get equal numbers of layers rather than of FLOPs."""
    keys = (
        p.pipeline_parallel_layers_per_stage,
        p.pipeline_parallel_first_stage_less_layers,
        p.pipeline_parallel_last_stage_less_layers,
    )
    return any(key is not None for key in keys)


def less_layers(p: Parallelism) -> tuple[int, int]:
    """Number of layers that the embedding and the output stand for."""
    first = p.pipeline_parallel_first_stage_less_layers
    last = p.pipeline_parallel_last_stage_less_layers
    return (1 if first is None else first), (1 if last is None else last)


def layers_per_stage(p: Parallelism, layers: int, count: int) -> list[int]:
    """Equal numbers of layers, with fewer on the first and the last stage.

    Either may have none: the first then holds the embedding alone, the last norm and output.
    """
    first_less, last_less = less_layers(p)
    base, extra = divmod(layers + first_less + last_less, count)
    sizes = [base + (stage < extra) for stage in range(count)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    return sizes


def stage_modules(module_lists: Sequence[Any], facts: Facts) -> list[list[str]]:
    """Stages as the user lists them: each one's modules, or the modules that start a new stage."""
    if not all(isinstance(entry, str) for entry in module_lists):
        return [list(entry) for entry in module_lists]
    names = list(facts.module_flops)
    cuts = [names.index(name) for name in module_lists if name in facts.module_flops]
    return [names[a:b] for a, b in itertools.pairwise([0, *cuts, len(names)])]


# ---- rules


@rule(f"{_P}_schedule", f"{_P}_schedule_csv")
def schedule_is_named(config: Config, facts: Facts) -> str | None:
    p = config.parallelism
    name = p.pipeline_parallel_schedule
    if p.pipeline_parallel_degree == 1 or p.pipeline_parallel_schedule_csv:
        return None
    if not name.startswith("PipelineSchedule"):
        return None
    return (
        f"{_P}_schedule: {name} runs a schedule from a file; set {_P}_schedule_csv, or name "
        "another schedule"
    )


@rule(f"{_P}_degree", needs=["tied_modules"])
def weights_stay_on_one_stage(config: Config, facts: Facts) -> str | None:
    if config.parallelism.pipeline_parallel_degree == 1 or not facts.tied_modules:
        return None
    return (
        f"{_P}_degree: {config.model.flavor} shares one weight between "
        f"{' and '.join(facts.tied_modules)}, which would be on different stages; untie them "
        "([model.overrides] tie_embeddings = false), or set the degree to 1"
    )


@rule(
    _MODULE_LISTS,
    f"{_P}_degree",
    f"{_P}_layers_per_stage",
    f"{_P}_first_stage_less_layers",
    f"{_P}_last_stage_less_layers",
    needs=["module_flops", "schedule_file"],
)
def model_splits_into_stages(config: Config, facts: Facts) -> list[str]:
    p = config.parallelism
    if p.pipeline_parallel_degree == 1:
        return []
    if problems := list(_module_list_problems(p, facts)):
        return problems
    count, key = stage_count(p, facts)
    if problems := list(_count_problems(count, key, p, facts)):
        return problems
    if p.module_fqns_per_model_part:
        return []
    layers = len(layers_of(facts))
    if not splits_by_layers(p):
        most = _most_stages(facts)
        if count <= most:
            return []
        return [
            f"{key}: {count} stages for {layers} layers; at most {most} are possible, embedding "
            f"and output being alone on theirs; lower {_P}_degree, or choose a schedule with "
            "fewer stages"
        ]
    sizes = layers_per_stage(p, layers, count)
    if min(sizes) >= 0 and 0 not in sizes[1:-1]:
        return []
    first_less, last_less = less_layers(p)
    advice = "lower them" if min(sizes) < 0 else "raise them, or use fewer stages"
    return [
        f"{_P}_first/last_stage_less_layers: {layers} layers on {count} stages with {first_less} "
        f"and {last_less} fewer at the ends leave a stage empty ({listed(sizes)}); {advice}"
    ]


def _most_stages(facts: Facts) -> int:
    """Largest number of stages balanced by FLOPs: one per module that costs any, and one for the
    embedding alone.
    """
    costs = list(facts.module_flops.values())
    return sum(cost > 0 for cost in costs) + (costs[0] == 0)


def _count_problems(count: int, key: str, p: Parallelism, facts: Facts) -> Iterator[str]:
    if facts.schedule_file is not None:
        stages = len(facts.schedule_file.ranks)
        if stages != count:
            yield f"{key}: {count} stages, but the schedule of {_P}_schedule_csv has {stages}"
        return
    schedule = schedule_of(p)
    degree = p.pipeline_parallel_degree
    per_rank, remainder = divmod(count, degree)
    if schedule.stages_per_rank == "one":
        fits = per_rank == 1
        legal = f"1 stage per rank ({degree} stages)"
    elif schedule.v_shaped:
        fits = per_rank == 2
        legal = f"2 stages per rank ({2 * degree} stages)"
    else:
        fits = per_rank >= 2
        legal = f"2 or more stages per rank ({2 * degree}, {3 * degree}, ... stages)"
    if remainder or not fits:
        yield (
            f"{key}: gives {count} stages on {degree} ranks, but schedule "
            f"{p.pipeline_parallel_schedule} takes {legal}"
        )


def _module_list_problems(p: Parallelism, facts: Facts) -> Iterator[str]:
    module_lists = p.module_fqns_per_model_part
    if not module_lists:
        return
    names = list(facts.module_flops)
    position = {name: index for index, name in enumerate(names)}
    modules_text = f"the model has {names[0]}, {names[1]} ... {names[-1]}"
    if all(isinstance(entry, str) for entry in module_lists):
        unknown = [name for name in module_lists if name not in position]
        cuts = [position[name] for name in module_lists if name in position]
        if unknown:
            yield f"{_MODULE_LISTS}: no module {brief(unknown[0])}; {modules_text}"
        elif sorted(set(cuts)) != cuts or cuts[0] == 0:
            yield (
                f"{_MODULE_LISTS}: the modules that start a stage must be in the model's order, "
                f"after {names[0]}"
            )
        return
    all_names = [name for entry in module_lists for name in entry]
    stages = Counter(all_names)
    for name, count in stages.items():
        if name not in position:
            yield f"{_MODULE_LISTS}: no module {brief(name)}; {modules_text}"
        elif count > 1:
            yield f"{_MODULE_LISTS}: {name} is on {count} stages"
    absent_modules = [name for name in names if name not in stages]
    for name in absent_modules:
        yield f"{_MODULE_LISTS}: {name} is on no stage"
    if not absent_modules and len(all_names) == len(names) and all_names != names:
        first = next(a for a, b in zip(all_names, names, strict=True) if a != b)
        yield f"{_MODULE_LISTS}: {first} is out of order; stages run in the model's order"
    if not all(module_lists):
        yield f"{_MODULE_LISTS}: a stage without modules"


@rule(f"{_P}_microbatch_size", "training.local_batch_size", needs=["module_flops"])
def microbatches_divide(config: Config, facts: Facts) -> Iterator[str]:
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    size = config.parallelism.pipeline_parallel_microbatch_size
    for section, rows in rows_of(config, "local_batch_size").items():
        if rows % size:
            yield (
                f"{_P}_microbatch_size: {size} does not divide {section}.local_batch_size {rows}; "
                f"set it to one of {listed(divisors(rows))}"
            )


@rule(
    f"{_P}_schedule",
    f"{_P}_schedule_csv",
    f"{_P}_microbatch_size",
    "training.local_batch_size",
    needs=["module_flops", "schedule_file"],
)
def schedule_runs_the_microbatches(config: Config, facts: Facts) -> str | None:
    p = config.parallelism
    degree = p.pipeline_parallel_degree
    size = p.pipeline_parallel_microbatch_size
    rows = config.training.local_batch_size
    if degree == 1 or rows % size or model_splits_into_stages(config, facts):
        return None
    if facts.schedule_file is not None:
        microbatches = facts.schedule_file.microbatches
        if rows == microbatches * size:
            return None
        return (
            f"{_P}_schedule_csv: the schedule has {microbatches} microbatches, but "
            f"training.local_batch_size {rows} / {_P}_microbatch_size {size} is {rows // size}; "
            f"set training.local_batch_size = {microbatches * size}"
        )
    schedule = schedule_of(p)
    stages, _ = stage_count(p, facts)
    reason = _reason_against(schedule, rows // size, stages, degree)
    if reason is None:
        return None
    legal_sizes = [
        d for d in divisors(rows) if not _reason_against(schedule, rows // d, stages, degree)
    ]
    if legal_sizes:
        advice = f"set {_P}_microbatch_size to {' or '.join(map(str, legal_sizes[:8]))}"
    else:
        more = stages
        while _reason_against(schedule, more, stages, degree):
            more += 1
        advice = f"raise training.local_batch_size to {more * size}"
    return f"{_P}_schedule: {p.pipeline_parallel_schedule} {reason}; {advice}"


def _reason_against(schedule: Schedule, microbatches: int, stages: int, degree: int) -> str | None:
    rounds = max(1, microbatches // degree)
    if schedule.microbatches == "whole rounds" and microbatches % rounds:
        return f"can't run {microbatches} microbatches on {degree} ranks in {rounds} equal rounds"
    if schedule.microbatches == "one per stage" and microbatches < stages:
        return f"needs at least as many microbatches as its {stages} stages, got {microbatches}"
    return None
