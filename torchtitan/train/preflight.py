"""Gather the facts that the rules of `config/rules` need, and apply them before any rank starts.

Needs no process group and no GPU, and imports no torch.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torchtitan.config.derive import longest_row, stages_of
from torchtitan.config.load.render import to_toml
from torchtitan.config.registry import TRACKER_PACKAGES
from torchtitan.config.rules import ABSENT, HERE, Accelerator, Facts, located, problems, with_ranks
from torchtitan.config.sections.parallelism import Compile
from torchtitan.config.sections.schema import Config
from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.models import (
    ModelSpec,
    block_matrices,
    export_problems,
    exported_buffers,
    get_spec,
    parameter_names,
)
from torchtitan.models.args import DecoderArgs
from torchtitan.parallel.pipeline.split import PipelinePlan, assign_stages
from torchtitan.train.inputs import NamedModel, open_inputs
from torchtitan.utils.accelerators import missing_for_kernels
from torchtitan.utils.errors import CheckpointError, ConfigError
from torchtitan.utils.storage import is_url, storage_path
from torchtitan.utils.torch_compat import torch_is_before_2_13
from torchtitan.utils.torch_versions import installed_torch


@dataclass(frozen=True)
class Setup:
    """The model, tokenizer and pipeline that the configuration names, checked."""

    spec: ModelSpec
    args: Any
    tokenizer: Tokenizer
    stages: PipelinePlan | None
    """None without pipeline parallelism."""
    warnings: tuple[str, ...] = ()
    """Settings that are legal, but probably mistakes."""
    stage_args: tuple[Any, ...] = ()
    """`args` in each stage of the data, whose positions may differ; empty if there is one stage."""

    def args_of(self, stage: int) -> Any:
        """Hyper-parameters in a stage of the data."""
        return self.stage_args[stage] if self.stage_args else self.args

    @property
    def n_experts(self) -> int:
        """Number of experts in each block that has experts; 0 for a dense model."""
        return next(iter(self.spec.expert_sizes(self.args).values()), 0)

    @property
    def n_mtp(self) -> int:
        """Number of modules of multi-token prediction."""
        return self.spec.mtp_modules(self.args)

    def width_ratio(self, fqn: str) -> float:
        """`ModelSpec.width_ratio` of this model's parameter called `fqn`."""
        return self.spec.width_ratio(fqn, self.args)


def preflight(
    config: Config,
    *,
    world: int | None = None,
    sources: Mapping[str, str] | None = None,
    device: Accelerator | None = None,
    whole: Config | None = None,
    other_problems: Sequence[str] = (),
    output: bool = True,
) -> Setup:
    """Find the model, tokenizer, data and folders that `config` names, and apply the rules.

    Args:
        world: number of ranks, if `config` isn't validated for it yet.
        sources: key to where it was set, named in the messages.
        device: the kind of device it trains on, if known.
        whole: the configuration before keys of files that this machine lacks were removed. All
            other rules are applied to it.
        other_problems: problems from elsewhere, reported with these.
        output: also create the dump folder and check that it is writable.

    Raises:
        ConfigError: all problems.
    """
    reasons: list[str] = []
    model = read_model(config, reasons)
    inputs = open_inputs(config, model, reasons)
    reasons += _step_problems(config)
    facts = replace(machine_facts(config), **model.facts, **inputs.facts)
    if device is not None:
        facts = replace(facts, device=device)
    if whole is None:
        facts = replace(facts, missing_for_kernels=missing_for_kernels())
    if world is not None and whole is None:
        facts = with_ranks(facts, config, world)
    reasons = [*other_problems, *problems(config, facts), *reasons]
    if world is not None and whole is not None:
        # The machines that train may have what this one lacks.
        portable_facts = replace(facts, **dict.fromkeys(HERE, ABSENT))
        whole_problems = problems(whole, with_ranks(portable_facts, whole, world))
        reasons = list(dict.fromkeys([*whole_problems, *reasons]))
    if output and not reasons:  # last, because it creates the folder
        reasons = problems(config, Facts(unwritable=_try_dump_folder(config)))
    if reasons or model.spec is None or inputs.tokenizer is None:
        raise ConfigError([located(problem, sources or {}) for problem in reasons])
    return Setup(
        model.spec,
        model.args,
        inputs.tokenizer,
        assign_stages(config, facts),
        warnings=(*inputs.tokenizer.notes, *problems(config, facts, refuses=False)),
        stage_args=model.stage_args,
    )


# ---- the keys


def read_model(config: Config, reasons: list[str]) -> NamedModel:
    """The model that the keys describe. Opens no file.

    Args:
        reasons: receives the reasons why there is no such model.
    """
    try:
        spec = get_spec(config.model.name)
        stage_args = args_of_stages(config, spec)
        return NamedModel(spec, tuple(stage_args), _model_facts(config, spec, stage_args))
    except ConfigError as error:
        reasons += error.problems
        return NamedModel()


def split_facts(spec: ModelSpec, args: Any) -> Facts:
    """The facts for the rules on splitting a model over ranks, except for pipelines."""
    return Facts(
        old_torch=torch_is_before_2_13(),
        tensor_parallel_sizes=spec.tensor_parallel_sizes(args),
        context_parallel_sizes=spec.context_parallel_sizes(args),
        expert_sizes=spec.expert_sizes(args),
    )


def args_of_stages(config: Config, spec: ModelSpec) -> list[Any]:
    """The model's hyper-parameters before `training.stages` begin, and in each stage.

    Raises:
        ConfigError: an override that the family doesn't have, or positions that it can't have.
    """
    longest = longest_row(config, len(config.training.stages))
    stage_args: list[Any] = []
    for index, stage_config in enumerate(stages_of(config)):
        overrides = stage_config.model.overrides
        try:
            stage_args.append(spec.args(config.model.flavor, overrides, max_seq_len=longest))
        except ConfigError as error:
            if not index:
                raise
            step = config.training.stages[index - 1].from_step
            where = f"training.stages: the stage from_step {step}"
            raise ConfigError([f"{where}: {problem}" for problem in error.problems]) from None
    return stage_args


def _model_facts(config: Config, spec: ModelSpec, stage_args: Sequence[Any]) -> dict[str, Any]:
    """
    Args:
        stage_args: hyper-parameters in each stage of the data.
    """
    args, last_args = stage_args[0], stage_args[-1]
    names_weights = config.optimizer.param_groups or config.model.converters
    ac = config.activation_checkpoint
    default = type(ac)().per_op_sac_force_recompute_mm_shapes_by_fqns
    names_products = ac.per_op_sac_force_recompute_mm_shapes_by_fqns != default
    uses_hf = config.checkpoint.initial_load_in_hf or config.checkpoint.last_save_in_hf
    return {
        "args": args,
        "decoder": args if isinstance(args, DecoderArgs) else None,
        "mtp_modules": spec.mtp_modules(args),
        "unused": spec.unused(args),
        "parameters": list(parameter_names(spec, args)) if names_weights else [],
        "block_matrices": block_matrices(spec, args) if names_products else [],
        "tensor_parallel_sizes": spec.tensor_parallel_sizes(args),
        "context_parallel_sizes": spec.context_parallel_sizes(args),
        "expert_sizes": spec.expert_sizes(args),
        "export_problems": export_problems(spec, last_args) if uses_hf else [],
        "has_hf_class": spec.hf is not None,
        "exported_buffers": exported_buffers(spec, args) if uses_hf else [],
        "module_flops": spec.module_flops(args, config.training.seq_len),
        "tied_modules": spec.tied_modules(args),
    }


# ---- this machine


def machine_facts(config: Config) -> Facts:
    """Software of this machine, and which of the named folders exist."""
    packages = ("fla", "lm_eval", "matplotlib", *TRACKER_PACKAGES.values())
    paths = (config.eval.include_path, config.checkpoint.initial_load_path)
    folders = [path for path in paths if path and not is_url(path)]
    return Facts(
        torch=installed_torch(),
        old_torch=torch_is_before_2_13(),
        folders={path for path in folders if os.path.isdir(storage_path(path))},
        packages={name for name in packages if importlib.util.find_spec(name)},
        compilers=_registered_compilers(config),
    )


def _step_problems(config: Config) -> list[str]:
    """The reason why the run can't resume from `checkpoint.load_step` in a local folder. Imports
    torch only if that step is missing.
    """
    c = config.checkpoint
    step = c.load_step
    if step < 0 or not c.enable or is_url(c.folder):
        return []
    folder = storage_path(c.folder, config.job.dump_folder)
    if (folder / f"step-{step}/manifest.json").is_file():
        return []
    from torchtitan.checkpoint.backend import Storage
    from torchtitan.checkpoint.resume import steps_to_resume

    try:
        steps_to_resume(Storage(), folder, step, to_toml(config))
    except CheckpointError as error:
        return [str(error)]
    return []


def _registered_compilers(config: Config) -> list[str]:
    """Backends that packages register; looked up only for a configuration that may name one."""
    if config.compile.backend == Compile().backend:
        return []
    return [point.name for point in entry_points(group="torch_dynamo_backends")]


def _try_dump_folder(config: Config) -> str | None:
    """Create the dump folder. Returns why it can't be written to, or None."""
    folder = Path(config.job.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror
    return None
