"""Gather the facts that the rules of `config/rules` need, and apply them before any rank starts.

Needs no process group and no GPU, and imports no torch.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torchtitan.config.derive import stages_of
from torchtitan.config.registry import TRACKER_PACKAGES, data_sources, tokenizers
from torchtitan.config.rules import ABSENT, HERE, Accelerator, Facts, located, problems, with_ranks
from torchtitan.config.sections.data import Source, ValidationSet
from torchtitan.config.sections.parallelism import Compile
from torchtitan.config.sections.schema import Config
from torchtitan.config.sections.training import Training, Validation
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import Tokenizer, build_tokenizer
from torchtitan.data.read.files import path_problem
from torchtitan.data.read.matching import TooManyFilesError, matching_files
from torchtitan.data.tokens.token_files import describe
from torchtitan.models import (
    ModelSpec,
    export_problems,
    exported_buffers,
    get_spec,
    parameter_names,
)
from torchtitan.models.args import DecoderArgs
from torchtitan.parallel.pipeline.schedules import schedule_file
from torchtitan.parallel.pipeline.split import PipelinePlan, assign_stages
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.limits import SEARCHED_AT_CHECK
from torchtitan.utils.storage import is_url, storage_path
from torchtitan.utils.torch_compat import torch_is_before_2_13
from torchtitan.utils.torch_versions import installed_torch

_DESCRIBED = 16
"""Number of a folder's token files that are checked."""


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
    known: Sequence[str] = (),
    output: bool = True,
) -> Setup:
    """Find the model, tokenizer, data and folders that `config` names, and apply the rules.

    Args:
        world: number of ranks, if `config` isn't validated for it yet.
        sources: key to where it was set, named in the messages.
        device: the kind of device it trains on, if known.
        whole: the configuration that `config` is without the files that this machine lacks. It is
        asked about everything else.
        known: problems that are known already, reported with the others.
        output: also create the dump folder and check that it is writable.

    Raises:
        ConfigError: everything that is missing or inconsistent.
    """
    facts = _machine_facts(config)
    if device is not None:
        facts = replace(facts, device=device)
    if world is not None and whole is None:
        facts = with_ranks(facts, config, world)
    reasons: list[str] = []
    spec = args = tokenizer = None
    try:
        spec = get_spec(config.model.name)
        args, *later = args_of_stages(config, spec)
        facts = replace(facts, **_model_facts(config, spec, args, later))
        facts = replace(facts, schedule_file=schedule_file(config))
        reasons += _initial_weights_problems(config, spec, args)
    except ConfigError as error:
        reasons += error.problems
    try:
        custom = tokenizers.maker(config.model.tokenizer, config.custom)
        tokenizer = build_tokenizer(
            config.model.hf_assets_path,
            custom,
            config.model.end_of_document,
            config.model.chat_template,
        )
        facts = replace(facts, tokenizer=tokenizer)
        reasons += _end_problems(config, tokenizer)
        reasons += _chat_problems(config, tokenizer, args)
        reasons += _token_file_problems(config, tokenizer)
    except UserError as error:
        reasons.append(str(error))
    reasons = [*known, *problems(config, facts), *reasons]
    if world is not None and whole is not None:
        elsewhere_facts = replace(facts, **dict.fromkeys(HERE, ABSENT))
        asked = problems(whole, with_ranks(elsewhere_facts, whole, world))
        reasons = list(dict.fromkeys([*asked, *reasons]))
    if output and not reasons:  # last, because it creates the folder
        reasons = problems(config, Facts(unwritable=_try_dump_folder(config)))
    if reasons or spec is None or tokenizer is None:
        raise ConfigError([located(problem, sources or {}) for problem in reasons])
    warnings = (*tokenizer.notes, *problems(config, facts, refuses=False))
    return Setup(
        spec,
        args,
        tokenizer,
        assign_stages(config, facts),
        warnings=warnings,
        stage_args=(args, *later),
    )


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
    longest = _longest_row(config)
    stage_args: list[Any] = []
    before = None
    for index, staged in enumerate(stages_of(config)):
        overrides = staged.model.overrides
        if overrides == before:
            stage_args.append(stage_args[-1])
            continue
        before = overrides
        try:
            stage_args.append(spec.args(config.model.flavor, overrides, max_seq_len=longest))
        except ConfigError as error:
            if not index:
                raise
            step = config.training.stages[index - 1].from_step
            where = f"training.stages: the stage from_step {step}"
            raise ConfigError([f"{where}: {problem}" for problem in error.problems]) from None
    return stage_args


def _longest_row(config: Config) -> int:
    """Length of the longest row that the model reads."""
    lengths = [stage.training.seq_len for stage in stages_of(config)]
    if config.validation.enable:
        lengths.append(config.validation.seq_len)
    return max(lengths)


def _model_facts(
    config: Config, spec: ModelSpec, args: Any, later: Sequence[Any]
) -> dict[str, Any]:
    """
    Args:
        later: hyper-parameters in later stages of the data.
    """
    named = config.optimizer.param_groups or config.model.converters
    exported = config.checkpoint.initial_load_in_hf or config.checkpoint.last_save_in_hf
    return {
        "args": args,
        "decoder": args if isinstance(args, DecoderArgs) else None,
        "mtp_modules": spec.mtp_modules(args),
        "unused": spec.unused(args),
        "parameters": list(parameter_names(spec, args)) if named else [],
        "tensor_parallel_sizes": spec.tensor_parallel_sizes(args),
        "context_parallel_sizes": spec.context_parallel_sizes(args),
        "expert_sizes": spec.expert_sizes(args),
        "export_problems": export_problems(spec, [args, *later][-1]) if exported else [],
        "has_hf_class": spec.hf is not None,
        "exported_buffers": exported_buffers(spec, args) if exported else [],
        "module_flops": spec.module_flops(args, config.training.seq_len),
        "tied_modules": spec.tied_modules(args),
    }


def hf_weights_folder(config: Config) -> Path:
    """The folder of `checkpoint.initial_load_in_hf`."""
    path = config.checkpoint.initial_load_path
    return storage_path(path) if path else find_asset(config.model.hf_assets_path)


def _initial_weights_problems(config: Config, spec: ModelSpec, args: Any) -> list[str]:
    """Why the run can't start from the Hugging Face folder that it names. Imports torch if there is
    one, and no checkpoint that the run would resume from instead.
    """
    section = config.checkpoint
    if not (section.enable and section.initial_load_in_hf) or spec.hf is None:
        return []
    if any(map(is_url, (section.initial_load_path or "", section.folder))):
        return []  # a rule refuses the first, and the second is looked up when the run starts
    folder = hf_weights_folder(config)
    if not folder.is_dir():
        return []
    from torchtitan.checkpoint.commit import committed_steps
    from torchtitan.checkpoint.hf.opening import open_hf

    try:
        if not committed_steps(storage_path(section.folder, config.job.dump_folder)):
            open_hf(folder, spec, args)
    except UserError as error:
        return [f"checkpoint.initial_load_in_hf: {error}"]
    return []


# ---- this machine


def _machine_facts(config: Config) -> Facts:
    """The facts of this machine that the rules need."""
    packages = ("fla", "lm_eval", "matplotlib", *TRACKER_PACKAGES.values())
    named = (config.eval.include_path, config.checkpoint.initial_load_path)
    folders = [path for path in named if path and not is_url(path)]
    return Facts(
        torch=installed_torch(),
        old_torch=torch_is_before_2_13(),
        data_problems=dict(_data_problems(config)),
        folders={path for path in folders if os.path.isdir(storage_path(path))},
        packages={name for name in packages if importlib.util.find_spec(name)},
        compilers=_registered_compilers(config),
    )


def _registered_compilers(config: Config) -> list[str]:
    """Backends that packages register; looked up only for a configuration that may name one."""
    if config.compile.backend == Compile().backend:
        return []
    return [point.name for point in entry_points(group="torch_dynamo_backends")]


def _data_sections(config: Config) -> dict[str, Training | Source | Validation | ValidationSet]:
    """The sections that name data, by key."""
    sections: dict[str, Training | Source | Validation | ValidationSet] = {
        "training": config.training
    }
    sections |= {f"training.sources.{entry.name}": entry for entry in config.training.sources}
    if config.validation.enable:
        sections["validation"] = config.validation
        sections |= {f"validation.sets.{entry.name}": entry for entry in config.validation.sets}
    return sections


def _end_problems(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """What a tokenizer without end-of-text can't do."""
    training = config.training
    asked = {
        "training.document_mask": training.document_mask,
        'training.packing = "best_fit"': training.packing == "best_fit",
        "eval.enable": config.eval.enable,
        "sampling.prompts: an empty prompt": "" in config.sampling.prompts
        and tokenizer.bos_id is None,
    }
    for key in (key for key, is_set in asked.items() if is_set):
        try:
            tokenizer.end_for(key)
        except UserError as error:
            yield str(error)


def _chat_problems(config: Config, tokenizer: Tokenizer, args: Any) -> Iterator[str]:
    """Reasons why conversations can't be read with the tokenizer."""
    for name, section in _data_sections(config).items():
        if section.messages_column is None:
            continue
        key = f"{name}.messages_column"
        try:
            needed = Chat(tokenizer, key).vocabulary
            if args is not None and needed > args.vocab_size:
                yield (
                    f"{key}: the chat template writes ids up to {needed - 1}, the model has only "
                    f"{args.vocab_size}; set [model.overrides] vocab_size = {needed}"
                )
        except UserError as error:
            yield str(error)


def _token_file_problems(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Reasons why files of ids that are here can't be read: of a folder, its first ones."""
    for name, section in _data_sections(config).items():
        path = Path(section.dataset_path or "").expanduser()
        if not section.dataset_path or data_sources.find(section.dataset):
            continue
        named = [path.with_suffix(".bin")] if path.suffix in (".bin", ".idx") else []
        files = sorted(path.glob("*.bin"))[:_DESCRIBED] if path.is_dir() else named
        for file in filter(Path.is_file, files):
            try:
                describe(file, tokenizer, f"{name}.dataset_path")
            except UserError as error:
                yield str(error)
                break


def _data_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Pairs: the key of a path, and why no data can be read from it."""
    for name, section in _data_sections(config).items():
        path = section.dataset_path
        # A registered source interprets its path itself, and only the loader can look up a remote
        # file (hf://, s3://).
        if not path or "://" in path or data_sources.find(section.dataset):
            continue
        if problem := _path_problem(path):
            yield f"{name}.dataset_path", problem


def _path_problem(path: str) -> str | None:
    if os.path.exists(path):
        return path_problem(path)
    try:
        if next(matching_files(path, SEARCHED_AT_CHECK, skipped=[]), None) is None:
            return f"no file matches {path!r} (relative to {Path.cwd()})"
    except TooManyFilesError as error:
        return f"{error} and finds no file; name a folder closer to the files"
    return None


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
