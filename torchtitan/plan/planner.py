"""From command-line arguments to a plan, and from a plan to the configuration that it proposes."""

import dataclasses
import sys
from glob import glob
from pathlib import Path
from typing import Any

from torchtitan.config import load_config, resolve
from torchtitan.config.derive import replace
from torchtitan.config.render import to_toml
from torchtitan.config.schema import Config
from torchtitan.plan.hardware import Hardware
from torchtitan.plan.predict import Plan, predict, trace_memory
from torchtitan.plan.search import Found, search
from torchtitan.plan.workload import Workload
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import UserError

_PROPOSALS = 3
"""Plans that are traced until one fits; if none does, the first is the answer."""


def make_plan(
    argv: list[str], world: int, hardware: Hardware, *, searching: bool = False, tracing: bool = False
) -> tuple[Plan, Found | None]:
    """Plan the configuration of `argv`, or the best that a search finds from it.

    Args:
        argv: configuration flags.
        tracing: trace the memory of the plan instead of computing it.

    Returns:
        The plan, and what the search found, if any.

    Raises:
        ConfigError: the trainer would refuse the configuration.
        UserError: a search found nothing that fits.
    """
    resolved = resolve(argv, world)
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    here, notes = without_missing_files(resolved.config)
    setup = preflight(here, output=False)
    found = None
    if searching:
        found = search(resolved.config, setup.spec, setup.args, world, hardware)
        if not found.best:
            raise UserError(
                f"--search: none of {found.seen} legal configurations on {world} ranks fits in the "
                f"{hardware.usable_gib:.0f} GiB of {hardware.name}; use more ranks, a smaller training.seq_len, more "
                "training.loss_chunks, or optimizer.state_dtype bfloat16"
            )
    proposals = (
        found.best if found else [predict(Workload(resolved.config, setup.args, setup.stages), setup.spec, hardware)]
    )
    if tracing:
        proposals = _traced_until_one_fits(proposals[:_PROPOSALS])
    plan = next((plan for plan in proposals if plan.fits), proposals[0])
    return dataclasses.replace(plan, notes=(*plan.notes, *notes)), found


def _traced_until_one_fits(proposals: list[Plan]) -> list[Plan]:
    traced = []
    for proposal in proposals:
        here, _ = without_missing_files(proposal.config)
        preflight(here, output=False)
        traced.append(trace_memory(proposal, here))
        if traced[-1].fits:
            break
    return traced


def without_missing_files(config: Config) -> tuple[Config, list[str]]:
    """The configuration without the tokenizer, data and checkpoint that only the cluster has, and a note on each."""
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
            notes.append(f"{key} {path!r} is not on this machine; the plan doesn't need it, the run will")
    # A plan is for training; validation needs less (docs/plan-memory.md).
    return replace(config, "validation.sets", []), notes


def planned_toml(plan: Plan, argv: list[str]) -> str:
    """The configuration of `argv` with the plan's layout, batch sizes and checkpointing, as a TOML file."""
    config, planned = load_config(argv).config, plan.config
    batch = {key: getattr(planned.training, key) for key in ("local_batch_size", "global_batch_size")}
    sections = {
        "parallelism": planned.parallelism,
        "activation_checkpoint": planned.activation_checkpoint,
        "training": config.training.model_copy(update=batch),
    }
    return (
        f"# {config.model.name} {config.model.flavor} on {plan.workload.world} x {plan.hardware.description}.\n"
        f"# Planned: {plan.tokens_per_second:,.0f} tokens/s per GPU, {plan.peak_gib:.1f} GiB.\n\n"
        f"{to_toml(config.model_copy(update=sections), only_changed=True)}"
    )
