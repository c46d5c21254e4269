"""From command-line arguments to a plan, and from a plan to the configuration that it proposes."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from glob import glob
from operator import attrgetter

from torchtitan.config import Resolved, complete, load_config
from torchtitan.config.derive import new_shapes, replace, stages_of
from torchtitan.config.load.decode import LoadedConfig
from torchtitan.config.load.render import to_toml
from torchtitan.config.sections.schema import Config
from torchtitan.tools.planner.advice import wasteful
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.layouts import any_layout
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.planner.search import SearchResult, search
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.preflight import Setup, preflight
from torchtitan.utils.errors import ConfigError, show_warnings
from torchtitan.utils.wording import plural, show_gib, show_rate

_FILES = (
    *("model.hf_assets_path", "training.dataset_path"),
    *("validation.dataset_path", "checkpoint.initial_load_path"),
)
"""Keys of files that the cluster may have alone."""
_LAYOUT_KEYS = ("parallelism", "activation_checkpoint", "training.local_batch_size")
"""Sections and keys that a plan chooses."""


def make_plan(argv: list[str], world: int, hardware: Hardware) -> Plan:
    """Plan the configuration of `argv`.

    Args:
        argv: configuration flags.

    Raises:
        ConfigError: the trainer would refuse it on this hardware.
    """
    plan = _plan_of(load_config(argv), world, hardware)
    return plan.noting(wasteful(plan))


def _plan_of(loaded: LoadedConfig, world: int, hardware: Hardware) -> Plan:
    resolved = complete(loaded, world, check=False)
    show_warnings(resolved.warnings)
    setup, notes = _preflight(resolved, world, hardware)
    show_warnings(setup.warnings)
    return plan_of_stages(resolved.config, setup, hardware).noting(notes)


def _preflight(resolved: Resolved, world: int, hardware: Hardware) -> tuple[Setup, list[str]]:
    """The model, tokenizer and files of a configuration, checked for this hardware, and notes on
    files that this machine lacks.
    """
    local, notes = without_missing_files(resolved.config)
    setup = preflight(
        local,
        whole=resolved.config,
        world=world,
        sources=resolved.sources,
        device=hardware.accelerator,
        output=False,
    )
    return setup, notes


def plan_of_stages(config: Config, setup: Setup, hardware: Hardware) -> Plan:
    """The plan of a run by the closed forms. Rows may become longer, so each stage of the data is a
    separate workload: the speed is the first stage's, the memory the stage's that needs most, the
    time the sum of all stages'.
    """
    stages = stages_of(config)
    is_new = new_shapes(config)
    if sum(is_new) == 1:
        stages = [config]
    plans = [
        predict(Workload(stage, setup.args_of(i), setup.stages), setup.spec, hardware)
        for i, stage in enumerate(stages)
    ]
    first = plans[0]
    if len(plans) == 1:
        return first
    first_steps = [1, *(stage.from_step for stage in config.training.stages)]
    last = config.training.steps + 1
    begins = [min(step, last) for step in (*first_steps, last)]
    steps = [after - begin for begin, after in itertools.pairwise(begins)]
    run_plan = dataclasses.replace(first, stages=tuple(zip(steps, plans, strict=True)))
    tightest = run_plan.tightest
    return dataclasses.replace(run_plan, memory=tightest.memory).noting(
        _stage_notes(first_steps, plans, is_new, tightest)
    )


def _stage_notes(
    steps: list[int], plans: list[Plan], is_new: list[bool], tightest: Plan
) -> Iterator[str]:
    for step, plan, compiles in zip(steps, plans, is_new, strict=True):
        t = plan.config.training
        suffix = "; the memory above is this stage's" if plan is tightest else ""
        if compiles and plan.workload.compiled:
            suffix += "; compiles its blocks for these rows"
        yield (
            f"from step {step:,}: {t.global_batch_size} x {t.seq_len} tokens per step, "
            f"{plural(t.local_batch_size, 'row')} per rank: {show_gib(plan.peak_gib)}, "
            f"{show_rate(plan.tokens_per_second)} tokens/s per GPU{suffix}"
        )


def find_layouts(
    argv: list[str],
    world: int,
    hardware: Hardware,
    *,
    show_configured: bool = True,
    only_best: bool = False,
) -> SearchResult:
    """Search from the configuration of `argv`, whose layout need not be one of `world` ranks.

    Args:
        argv: configuration flags.
        show_configured: show the layout of `argv` beside the others.
        only_best: as for `search`.

    Returns:
        What the search found, perhaps nothing that fits. The first plan has notes on the search.

    Raises:
        ConfigError: the trainer would refuse the configuration on this hardware, or all layouts of
        it.
    """
    hardware.check_ranks(world)
    loaded = load_config(argv)
    anywhere = dataclasses.replace(loaded, config=any_layout(loaded.config, world))
    start = complete(anywhere, world=1, check=False)
    setup, notes = _preflight(start, 1, hardware)
    if loaded.config.training.global_batch_size == -1:
        rows = start.config.training.global_batch_size
        notes.append(
            f"training.global_batch_size is not set; on {plural(world, 'GPU')}, all layouts train "
            f"on {plural(rows, 'row')} per step"
        )
    if any(stage.seq_len or stage.local_batch_size for stage in start.config.training.stages):
        notes.append(
            "the search plans the first stage of training.stages only; plan the layout it proposes "
            "for the memory of all"
        )
    baseline = None
    try:
        if show_configured:
            baseline = _plan_of(loaded, world, hardware)
    except ConfigError as error:
        notes.append(f"the configured layout is refused on {world} ranks: {error.problems[0]}")
    result = search(
        start.config,
        setup.spec,
        setup.args,
        world,
        hardware=hardware,
        baseline=baseline,
        only_best=only_best,
    )
    if math.isinf(result.smallest_gib):
        raise ConfigError(
            [f"--search: no layout of {plural(world, 'rank')} is legal", *result.refused]
        )
    for first in result.best[:1]:
        plan = first.plan.noting([*notes, *wasteful(first.plan)])
        result.best[0] = dataclasses.replace(first, plan=plan)
    return result


def nothing_fits(result: SearchResult, world: int, hardware: Hardware) -> str:
    """Why a search proposes nothing."""
    return (
        f"none of {plural(result.seen, 'configuration')} on {plural(world, 'rank')} is "
        f"likely to fit in the {show_gib(hardware.usable_gib)} of {hardware.name}: the leanest "
        f"takes {show_gib(result.smallest_gib)}"
    )


def without_missing_files(config: Config) -> tuple[Config, list[str]]:
    """The configuration without files that only the cluster has, and a note on each."""
    notes = []
    defaults = Config()
    for key in _FILES:
        path, default = map(attrgetter(key), (config, defaults))
        if path and path != default and not glob(path, recursive=True):
            config = replace(config, key, default)
            notes.append(
                f"{key} {path!r} is not on this machine; the plan doesn't need it, the run will"
            )
    # A plan is for training; validation needs less (docs/internals/plan.md).
    return replace(config, "validation.sets", []), notes


def planned_toml(plan: Plan, argv: list[str]) -> str:
    """The configuration of `argv` with the plan's layout, batch and checkpointing, as TOML."""
    config = load_config(argv).config
    for key in _LAYOUT_KEYS:
        config = replace(config, key, attrgetter(key)(plan.config))
    return (
        f"# {plan.model} on {plan.workload.world} x "
        f"{plan.hardware.description}.\n"
        f"# Planned: {show_rate(plan.tokens_per_second)} tokens/s per GPU, "
        f"{show_gib(plan.peak_gib)}.\n\n"
        f"{to_toml(config, only_changed=True)}"
    )
