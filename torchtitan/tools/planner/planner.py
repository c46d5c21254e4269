"""From command-line arguments to a plan, and from a plan to the configuration that it proposes."""

import dataclasses
from glob import glob
from pathlib import Path
from typing import Any

from torchtitan.config import Resolved, complete, load_config
from torchtitan.config.derive import replace
from torchtitan.config.load.render import to_toml
from torchtitan.config.rules import Facts, check
from torchtitan.config.sections.schema import Config
from torchtitan.tools.planner.axes import KEYS, read
from torchtitan.tools.planner.hardware import Hardware
from torchtitan.tools.planner.layouts import any_layout
from torchtitan.tools.planner.lengths import plan_of_stages
from torchtitan.tools.planner.predict import Plan
from torchtitan.tools.planner.search import Found, search
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError, show_warnings
from torchtitan.utils.wording import plural, show_gib, show_rate


def make_plan(
    argv: list[str],
    world: int,
    hardware: Hardware,
    *,
    searching: bool = False,
    axes: tuple[str, ...] = (),
) -> tuple[Plan, Found | None]:
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
    found: Found | None = None
    if searching:
        found, notes = find_layouts(argv, world, hardware, axes)
        if not found.best:
            raise UserError(
                f"--search: {nothing_fits(found, world, hardware)}; use more ranks, a smaller "
                "training.seq_len, more training.loss_chunks, optimizer.state_dtype bfloat16, or "
                "--axes loss_chunks,state_dtype,offload to try those"
            )
        plan = found.best[0].plan
    else:
        plan, notes = _plan_of(complete(load_config(argv), world), hardware)
    return dataclasses.replace(plan, notes=(*plan.notes, *notes)), found


def _plan_of(resolved: Resolved, hardware: Hardware) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a configuration by the closed forms, and notes on what is missing here."""
    show_warnings(resolved.warnings)
    here, notes = without_missing_files(resolved.config)
    setup = preflight(here, output=False)
    show_warnings(setup.warnings)
    check(resolved.config, Facts(device=hardware.accelerator))
    return plan_of_stages(resolved.config, setup, hardware), tuple(notes)


def find_layouts(
    argv: list[str], world: int, hardware: Hardware, axes: tuple[str, ...] = (), *, own: bool = True
) -> tuple[Found, tuple[str, ...]]:
    """Search from the configuration of `argv`, whose layout need not be one of `world` ranks.

    Args:
        own: show the layout of `argv` beside the others.

    Returns:
        What the search found, perhaps nothing that fits, and notes on the plan.

    Raises:
        ConfigError: the trainer would refuse the configuration on this hardware, or all layouts of
        it.
    """
    hardware.check_ranks(world)
    loaded = load_config(argv)
    start = complete(dataclasses.replace(loaded, config=any_layout(loaded.config, world)), world=1)
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
    setup = preflight(here, output=False)
    check(start.config, Facts(device=hardware.accelerator))
    baseline = None
    try:
        if own:
            baseline, _ = _plan_of(complete(loaded, world), hardware)
    except ConfigError as error:
        notes.append(f"the file's own layout is refused on {world} ranks: {error.problems[0]}")
    found = search(
        start.config, setup.spec, setup.args, world, hardware=hardware, axes=axes, baseline=baseline
    )
    if not found.seen:
        raise ConfigError(
            [f"--search: no layout of {plural(world, 'rank')} is legal", *found.refused]
        )
    return found, tuple(notes)


def nothing_fits(found: Found, world: int, hardware: Hardware) -> str:
    """Why a search proposes nothing."""
    return (
        f"none of {plural(found.seen, 'legal configuration')} on {plural(world, 'rank')} is likely "
        f"to fit in the {show_gib(hardware.usable_gib)} of {hardware.name}: the leanest takes "
        f"{show_gib(found.smallest_gib)}"
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
        f"# {config.model.name} {config.model.flavor} on {plan.workload.world} x "
        f"{plan.hardware.description}.\n"
        f"# Planned: {show_rate(plan.tokens_per_second)} tokens/s per GPU, "
        f"{show_gib(plan.peak_gib)}.\n\n"
        f"{to_toml(written, only_changed=True)}"
    )
