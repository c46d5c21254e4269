"""From command-line arguments to a plan, and from a plan to the configuration that it proposes."""

import dataclasses
import math
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from torchtitan.config import Resolved, complete, load_config
from torchtitan.config.derive import replace, stages_of
from torchtitan.config.load.render import to_toml
from torchtitan.config.sections.schema import Config
from torchtitan.tools.planner.advice import wasteful
from torchtitan.tools.planner.axes import KEYS, read
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.layouts import any_layout
from torchtitan.tools.planner.predict import Plan, predict
from torchtitan.tools.planner.search import SearchResult, search
from torchtitan.tools.planner.workload import Workload
from torchtitan.train.preflight import Setup, preflight
from torchtitan.utils.errors import ConfigError, UserError, show_warnings
from torchtitan.utils.wording import plural, show_gib, show_rate


def make_plan(
    argv: list[str],
    world: int,
    hardware: Hardware,
    *,
    searching: bool = False,
    axes: tuple[str, ...] = (),
) -> tuple[Plan, SearchResult | None]:
    """Plan the configuration of `argv`, or the best that a search finds from it.

    Args:
        argv: configuration flags.
        axes: what the search varies beside the layout, from `axes.AXES`.

    Returns:
        The plan, and what the search found, if any.

    Raises:
        ConfigError: the trainer would refuse the configuration on this hardware, or all layouts of
        it.
        UserError: a search found nothing that fits.
    """
    result: SearchResult | None = None
    if searching:
        result, notes = find_layouts(argv, world, hardware, axes)
        if not result.best:
            raise UserError(
                f"--search: {nothing_fits(result, world, hardware)}; use more ranks, a smaller "
                "training.seq_len, more training.loss_chunks, optimizer.state_dtype bfloat16, or "
                "--axes loss_chunks,state_dtype,offload to try those"
            )
        plan = result.best[0].plan
    else:
        plan, notes = _plan_of(complete(load_config(argv), world, check=False), world, hardware)
    return dataclasses.replace(plan, notes=(*plan.notes, *notes, *wasteful(plan))), result


def _plan_of(resolved: Resolved, world: int, hardware: Hardware) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a configuration by the closed forms, and notes on what is missing here."""
    show_warnings(resolved.warnings)
    here, notes = without_missing_files(resolved.config)
    setup = preflight(
        here,
        whole=resolved.config,
        world=world,
        sources=resolved.sources,
        device=hardware.accelerator,
        output=False,
    )
    show_warnings(setup.warnings)
    return plan_of_stages(resolved.config, setup, hardware), tuple(notes)


def plan_of_stages(config: Config, setup: Setup, hardware: Hardware) -> Plan:
    """The plan of a run by the closed forms. Rows may become longer, so each stage of the data is a
    workload of its own: the speed is the first stage's, the memory that of the stage that needs
    most, the time that of all.
    """
    staged = stages_of(config)
    shapes = [
        (stage_config.training.seq_len, stage_config.training.local_batch_size)
        for stage_config in staged
    ]
    if len(set(shapes)) == 1:
        return _stage_plan(config, setup, hardware, 0)
    plans = [
        _stage_plan(stage_config, setup, hardware, index)
        for index, stage_config in enumerate(staged)
    ]
    first = plans[0]
    tightest = max(plans, key=lambda plan: plan.peak_gib)
    first_steps = [1, *(stage.from_step for stage in config.training.stages)]
    return dataclasses.replace(
        first,
        memory=tightest.memory,
        tightest=None if tightest is first else tightest,
        stages=tuple(zip(first_steps, plans, strict=True)),
        notes=(*first.notes, *_stage_notes(first_steps, plans, tightest)),
    )


def _stage_plan(config: Config, setup: Setup, hardware: Hardware, stage: int) -> Plan:
    return predict(Workload(config, setup.args_of(stage), setup.stages), setup.spec, hardware)


def _stage_notes(steps: list[int], plans: list[Plan], tightest: Plan) -> Iterator[str]:
    for step, plan in zip(steps, plans, strict=True):
        t = plan.config.training
        which = "; the memory above is this stage's" if plan is tightest else ""
        yield (
            f"from step {step:,}: {t.global_batch_size} x {t.seq_len} tokens per step, "
            f"{plural(t.local_batch_size, 'row')} per rank: {show_gib(plan.peak_gib)}, "
            f"{show_rate(plan.tokens_per_second)} tokens/s per GPU{which}"
        )


def find_layouts(
    argv: list[str],
    world: int,
    hardware: Hardware,
    axes: tuple[str, ...] = (),
    *,
    show_configured: bool = True,
    only_best: bool = False,
) -> tuple[SearchResult, tuple[str, ...]]:
    """Search from the configuration of `argv`, whose layout need not be one of `world` ranks.

    Args:
        show_configured: show the layout of `argv` beside the others.
        only_best: as for `search`.

    Returns:
        What the search found, perhaps nothing that fits, and notes on the plan.

    Raises:
        ConfigError: the trainer would refuse the configuration on this hardware, or all layouts of
        it.
    """
    hardware.check_ranks(world)
    loaded = load_config(argv)
    anywhere = dataclasses.replace(loaded, config=any_layout(loaded.config, world))
    start = complete(anywhere, world=1, check=False)
    here, notes = without_missing_files(start.config)
    if loaded.config.training.global_batch_size == -1:
        rows = start.config.training.global_batch_size
        notes.append(
            f"training.global_batch_size is not set; all layouts train on {plural(rows, 'row')} "
            "per step"
        )
    if any(stage.seq_len or stage.local_batch_size for stage in start.config.training.stages):
        notes.append(
            "the search plans the first stage of training.stages only; plan the layout it proposes "
            "for the memory of all"
        )
    setup = preflight(
        here,
        whole=start.config,
        world=1,
        sources=start.sources,
        device=hardware.accelerator,
        output=False,
    )
    baseline = None
    try:
        if show_configured:
            baseline, _ = _plan_of(complete(loaded, world, check=False), world, hardware)
    except ConfigError as error:
        notes.append(f"the file's own layout is refused on {world} ranks: {error.problems[0]}")
    result = search(
        start.config,
        setup.spec,
        setup.args,
        world,
        hardware=hardware,
        axes=axes,
        baseline=baseline,
        only_best=only_best,
    )
    if math.isinf(result.smallest_gib):
        raise ConfigError(
            [f"--search: no layout of {plural(world, 'rank')} is legal", *result.refused]
        )
    return result, tuple(notes)


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
    files: list[tuple[str, str | None, Any]] = [
        ("model.hf_assets_path", config.model.hf_assets_path, Config().model.hf_assets_path),
        ("training.dataset_path", config.training.dataset_path, None),
        ("validation.dataset_path", config.validation.dataset_path, None),
        ("checkpoint.initial_load_path", config.checkpoint.initial_load_path, None),
    ]
    for key, path, default in files:
        if path and path != default and not glob(str(Path(path).expanduser()), recursive=True):
            config = replace(config, key, default)
            notes.append(
                f"{key} {path!r} is not on this machine; the plan doesn't need it, the run will"
            )
    # A plan is for training; validation needs less (docs/internals/plan-memory.md).
    return replace(config, "validation.sets", []), notes


def planned_toml(plan: Plan, argv: list[str]) -> str:
    """The configuration of `argv` with the plan's layout, batch and checkpointing, as TOML."""
    config = load_config(argv).config
    planned = plan.config
    batch = {
        key: getattr(planned.training, key) for key in ("local_batch_size", "global_batch_size")
    }
    training = config.training.model_copy(update=batch)
    sections = {
        "parallelism": planned.parallelism,
        "activation_checkpoint": planned.activation_checkpoint,
        "training": training,
    }
    written = config.model_copy(update=sections)
    for key in KEYS:  # what only --axes change
        written = replace(written, key, read(planned, key))
    return (
        f"# {config.model.label} on {plan.workload.world} x "
        f"{plan.hardware.description}.\n"
        f"# Planned: {show_rate(plan.tokens_per_second)} tokens/s per GPU, "
        f"{show_gib(plan.peak_gib)}.\n\n"
        f"{to_toml(written, only_changed=True)}"
    )
