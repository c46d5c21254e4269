"""Checks that need no process group and no GPU: model, tokenizer, data, folders. Imports no
torch.
"""

import fnmatch
import importlib.util
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torchtitan.config.derive import divisors, expert_ranks, expert_shard_dim
from torchtitan.config.registry import data_sources, tokenizers
from torchtitan.config.rules.support import names_any, splits_backward
from torchtitan.config.sections.data import Source, ValidationSet
from torchtitan.config.sections.schema import Config, MoE, Training, Validation
from torchtitan.data.text.files import TooManyFilesError, matching_files, path_problem
from torchtitan.data.text.tokenizer import Tokenizer, build_tokenizer
from torchtitan.models import ModelSpec, export_problems, get_spec, parameter_names
from torchtitan.models.decoder_spec import is_decoder
from torchtitan.parallel.pipeline_stages import PipelineStages, pipeline_stages
from torchtitan.telemetry.delivery import unreachable
from torchtitan.telemetry.trackers.base import missing_packages
from torchtitan.utils.errors import ConfigError, UserError, did_you_mean
from torchtitan.utils.limits import SEARCHED_AT_CHECK
from torchtitan.utils.storage import is_url, storage_path, storage_problem
from torchtitan.utils.text import brief, listed
from torchtitan.utils.torch_compat import torch_is_before_2_13
from torchtitan.utils.torch_versions import installed_torch, too_old


@dataclass(frozen=True)
class Setup:
    """The model, tokenizer and pipeline that the configuration names, checked."""

    spec: ModelSpec
    args: Any
    tokenizer: Tokenizer
    stages: PipelineStages | None
    """None without pipeline parallelism."""
    warnings: tuple[str, ...] = ()
    """What is legal, but probably a mistake."""

    @property
    def n_experts(self) -> int:
        """Experts of each block that has some; 0 for a dense model."""
        return next(iter(self.spec.expert_sizes(self.args).values()), 0)


def preflight(config: Config, *, output: bool = True) -> Setup:
    """Find the model, tokenizer, data and folders that `config` names.

    Args:
        output: also create the dump folder and check that it is writable.

    Raises:
        ConfigError: everything that is missing or doesn't fit together.
    """
    problems = [*_check_paths(config), *_check_packages(config), *_check_backend(config)]
    spec = args = tokenizer = stages = None
    warnings: list[str] = []
    try:
        spec = get_spec(config.model.name)
        lengths = [
            config.training.seq_len,
            *([config.validation.seq_len] if config.validation.enable else []),
        ]
        args = spec.args(config.model.flavor, config.model.overrides, max_seq_len=max(lengths))
        problems += check_tensor_parallel(config, spec.tensor_parallel_sizes(args))
        problems += check_experts(config, spec.expert_sizes(args))
        asked = config.optimizer.param_groups or config.model.converters
        names = parameter_names(spec, args) if asked else []
        problems += check_quantized_experts(config, spec.expert_sizes(args), names)
        problems += _check_patterns(config, names)
        problems += _check_hugging_face(config, spec, args)
        stages = pipeline_stages(
            config, spec.module_flops(args, config.training.seq_len), spec.tied_modules(args)
        )
        wrong, warnings = _check_own_code(config, spec, args)
        warnings += _doubts(config, args)
        problems += wrong
    except ConfigError as error:
        problems += error.problems
    try:
        tokenizer = build_tokenizer(
            config.model.hf_assets_path, tokenizers.chosen(config.model.tokenizer, config.custom)
        )
    except UserError as error:
        problems.append(str(error))
    if tokenizer and args and tokenizer.vocab_size > args.vocab_size:
        problems.append(
            f"model.hf_assets_path: the tokenizer has {tokenizer.vocab_size} entries, "
            "more than vocab_size "
            f"{args.vocab_size} of {config.model.flavor}; set [model.overrides] "
            f"vocab_size = {tokenizer.vocab_size}, "
            "or choose another tokenizer"
        )
    if tokenizer and args:
        problems += _check_prompts(config, tokenizer, args.max_seq_len)
    if output:
        problems += unreachable(config.notifications)
    if output and not problems:  # last, because it creates the folder
        problems += _check_dump_folder(config)
    if problems or spec is None or tokenizer is None:
        raise ConfigError(problems)
    return Setup(spec, args, tokenizer, stages, tuple(warnings))


def _check_own_code(config: Config, spec: ModelSpec, args: Any) -> tuple[list[str], list[str]]:
    """Problems and warnings of a family that isn't the decoder as it ships. Imports torch for such
    a family alone.
    """
    if is_decoder(spec):
        return [], []
    from torchtitan.train.family import check_family

    found = check_family(config, spec, args)
    return found.problems, found.warnings


def _doubts(config: Config, args: Any) -> Iterator[str]:
    """What is legal, but probably a mistake.

    Args:
        args: the model's hyper-parameters.
    """
    one = getattr(args, "experts_per_token", 0) == 1 and args.normalize_expert_weights
    if one and not config.moe.global_balance_loss and not config.moe.sequence_balance_loss:
        yield (
            "model.overrides.normalize_expert_weights: with one expert per token its "
            "weight is always 1, so without a "
            "balance loss the router learns nothing; set it to false, or "
            "moe.global_balance_loss above 0"
        )


def _check_prompts(config: Config, tokenizer: Tokenizer, longest: int) -> Iterator[str]:
    for prompt in config.sampling.prompts:
        if (tokens := len(tokenizer.encode(prompt, bos=True))) >= longest:
            yield (
                f"sampling.prompts: {brief(prompt)} has {tokens} tokens; the model reads "
                f"{longest}, of which one must "
                "be new: shorten it, or raise training.seq_len"
            )


def check_tensor_parallel(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """Sizes that the tensor-parallel degree does not divide."""
    degree = config.parallelism.tensor_parallel_degree
    if wrong := {name: size for name, size in sizes.items() if size % degree}:
        every = math.gcd(*sizes.values())
        yield (
            f"parallelism.tensor_parallel_degree: {degree} does not divide "
            f"{', '.join(f'{name} {size}' for name, size in wrong.items())} of "
            f"model.flavor {config.model.flavor}; "
            f"set it to one of {listed(divisors(every))}"
        )


def check_experts(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """Experts that can't be split as `config` says.

    Args:
        sizes: `ModelSpec.expert_sizes`.
    """
    p = config.parallelism
    model = f"model.flavor {config.model.flavor} of {config.model.name}"
    degree = p.expert_parallel_degree
    key = "parallelism.expert_parallel_degree"
    if not sizes:
        if degree > 1:
            yield f"{key}: {model} has no experts; set it to 1"
        if config.moe != MoE():
            yield f"[moe]: {model} has no experts; remove the section"
        return
    if splits_backward(config) and torch_is_before_2_13():
        yield (
            "parallelism.pipeline_parallel_schedule: with torch before 2.13, the "
            "backward of experts can't run in "
            "the two parts that this schedule needs; upgrade torch, or set Interleaved1F1B"
        )
    (name, count), *widths = sizes.items()
    shards = expert_ranks(p) // degree
    if count % degree:
        legal = divisors(math.gcd(count, expert_ranks(p)))
        yield (
            f"{key}: {degree} does not divide {name} {count} of {model}; set it to one of "
            f"{listed(legal)}"
        )
    elif (
        degree > 1
        and expert_shard_dim(count // degree, shards)
        and any(width % shards for _, width in widths)
    ):
        legal = [
            n
            for n in divisors(math.gcd(count, expert_ranks(p)))
            if _fsdp_divides(n, sizes, expert_ranks(p))
        ]
        sized = " nor ".join(f"{name} {width}" for name, width in widths)
        yield (
            f"{key}: with {degree}, FSDP shards {count // degree} experts over {shards} "
            "ranks, which divide neither "
            f"their number nor {sized}; set it to one of {listed(legal)}"
        )


def _fsdp_divides(degree: int, sizes: dict[str, int], ranks: int) -> bool:
    count, *widths = sizes.values()
    shards = ranks // degree
    return (
        degree == 1
        or not expert_shard_dim(count // degree, shards)
        or not any(w % shards for w in widths)
    )


def check_quantized_experts(
    config: Config, sizes: dict[str, int], parameters: Iterable[str]
) -> Iterator[str]:
    """Names of experts to convert that match none, and experts whose sizes the 8-bit kernels don't
    support.

    Args:
        sizes: `ModelSpec.expert_sizes`.
    """
    grouped = config.quantize.grouped_mm
    model = f"model.flavor {config.model.flavor} of {config.model.name}"
    modules = {name.rpartition(".")[0] for name in parameters if ".experts." in name}
    for converter, fqns, unit in (("float8", grouped.float8.fqns, 16), ("mx", grouped.mx.fqns, 32)):
        key = f"quantize.grouped_mm.{converter}"
        if key not in config.model.converters:
            continue
        if not sizes:
            yield f"{key}: {model} has no experts; remove it from model.converters"
            continue
        if not fqns:
            yield f'{key}.fqns names no experts; set it to ["experts"] for those of all blocks'
        for name in fqns:
            if not any(names_any([name], module) for module in modules):
                yield (
                    f"{key}.fqns: {brief(name)} is in the name of no experts; set it to "
                    '["experts"] for all'
                )
        if wrong := {name: size for name, size in list(sizes.items())[1:] if size % unit}:
            sizes_ = ", ".join(f"{name} {size}" for name, size in wrong.items())
            yield (
                f"{key}: {sizes_} of {model} must be a multiple of {unit}; remove it from "
                "model.converters"
            )


def _check_patterns(config: Config, parameters: Iterable[str]) -> Iterator[str]:
    """A pattern that matches nothing is a typo; its parameters would silently be trained like the
    rest.
    """
    names = list(parameters)
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    for group in config.optimizer.param_groups:
        if not fnmatch.filter(names, group.pattern):
            hint = did_you_mean(group.pattern, kinds, cutoff=0.3)
            yield (
                f"optimizer.param_groups: pattern {brief(group.pattern)} matches no parameter{hint}"
            )


def _check_hugging_face(config: Config, spec: ModelSpec, args: Any) -> Iterator[str]:
    """Weights that the family can't exchange with Hugging Face's transformers."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_in_hf and spec.hf is None:
        yield f"checkpoint.initial_load_in_hf: {export_problems(spec, args)[0]}"
    if checkpoint.last_save_in_hf:
        for problem in export_problems(spec, args):
            yield (
                f"checkpoint.last_save_in_hf: {problem}; or set checkpoint.last_save_in_hf = false"
            )


def _check_paths(config: Config) -> Iterator[str]:
    sections: dict[str, Training | Source | Validation | ValidationSet] = {
        "training": config.training
    }
    sections |= {f"training.sources.{one.name}": one for one in config.training.sources}
    if config.validation.enable:
        sections["validation"] = config.validation
        sections |= {f"validation.sets.{one.name}": one for one in config.validation.sets}
    for name, section in sections.items():
        # What a registered source reads is its own affair.
        path = section.dataset_path if data_sources.find(section.dataset) is None else None
        # Only the loader can look up a remote file (hf://, s3://).
        if not path or "://" in path:
            continue
        if os.path.exists(path):
            if problem := path_problem(path):
                yield f"{name}.dataset_path: {problem}"
        else:
            try:
                found = next(matching_files(path, SEARCHED_AT_CHECK, skipped=[]), None)
            except TooManyFilesError as error:
                yield (
                    f"{name}.dataset_path: {error} and finds no file; name a folder closer "
                    "to the files"
                )
            else:
                if found is None:
                    yield (
                        f"{name}.dataset_path: no file matches {path!r} (relative to {Path.cwd()})"
                    )
    tasks = config.eval.include_path
    if config.eval.enable and tasks and not os.path.isdir(tasks):
        yield f"eval.include_path: {tasks!r} is no folder (relative to {Path.cwd()})"
    if is_url(config.job.dump_folder):
        yield (
            f"job.dump_folder: {config.job.dump_folder!r} must be a local folder, "
            "because logs are appended to; for "
            "remote checkpoints set checkpoint.folder to the URL"
        )
    checkpoint = config.checkpoint
    path = checkpoint.initial_load_path or ""
    if not checkpoint.enable:
        return
    if checkpoint.initial_load_in_hf and is_url(path):
        yield (
            "checkpoint.initial_load_path: safetensors must be in a local folder, got "
            f"{path!r}; download them, or "
            "convert them to a checkpoint at that URL with `torchtitan ckpt from-hf`"
        )
    elif path and not is_url(path) and not os.path.isdir(storage_path(path)):
        yield f"checkpoint.initial_load_path: no folder {path!r} (relative to {Path.cwd()})"
    names = {
        "folder": checkpoint.folder,
        "upload_folder": checkpoint.upload_folder or "",
        "initial_load_path": path,
    }
    for key, name in names.items():
        if problem := storage_problem(name):
            yield f"checkpoint.{key}: {problem}"


def _check_packages(config: Config) -> Iterator[str]:
    if config.eval.enable and importlib.util.find_spec("lm_eval") is None:
        yield (
            "eval.enable needs the package lm-eval: pip install 'titan-pretrain[eval]', or "
            "set it to false"
        )
    yield from missing_packages(config.metrics)
    if problem := too_old(installed_torch()):
        yield problem
    ac = config.activation_checkpoint
    draws = ac.mode == "memory_budget" and ac.visualize_memory_budget_pareto
    if draws and importlib.util.find_spec("matplotlib") is None:
        yield (
            "activation_checkpoint.visualize_memory_budget_pareto needs the package "
            "matplotlib; install it, or set the "
            "key to false"
        )


_BACKENDS = (
    "inductor",
    "aot_eager",
    "eager",
    "cudagraphs",
    "tvm",
    "openxla",
    "onnxrt",
    "ts",
    "aot_ts",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
    "aot_eager_default_partitioner",
    "eager_debug",
    "eager_noexcept",
    "invoke_subgraph",
    "openxla_eval",
    "pre_dispatch_eager",
)
"""`torch._dynamo.list_backends`, which would import torch."""


def _check_backend(config: Config) -> Iterator[str]:
    """An unknown backend would fail only in the first step. A custom import may register one."""
    name = config.compile.backend
    if name in _BACKENDS or config.experimental.custom_import:
        return
    known = [*_BACKENDS, *(point.name for point in entry_points(group="torch_dynamo_backends"))]
    if name not in known:
        yield (
            "compile.backend: torch has no compiler backend "
            f"{brief(name)}{did_you_mean(name, known)}; import the "
            "module that registers it as experimental.custom_import, or set it to one of "
            f"{', '.join(_BACKENDS[:4])}"
        )


def _check_dump_folder(config: Config) -> Iterator[str]:
    folder = Path(config.job.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        yield (
            f"job.dump_folder: can't write to {str(folder)!r} ({error.strerror}); choose "
            "another folder"
        )
