"""Open the files that a configuration names: weights, tokenizer, data, a pipeline schedule.

Their contents become facts for the rules; a file that can't be used is a problem at once.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config.derive import data_sections
from torchtitan.config.registry import data_sources, tokenizers
from torchtitan.config.sections.schema import Config
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.prompts import encode_prompts, prompt_problems
from torchtitan.data.encode.tokenizer import Tokenizer, build_tokenizer
from torchtitan.data.read.files import path_problem
from torchtitan.data.read.matching import TooManyFilesError, matching_files
from torchtitan.data.tokens.token_files import describe, no_tokens
from torchtitan.models import ModelSpec
from torchtitan.parallel.pipeline.schedules import schedule_file
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.limits import SEARCHED_AT_CHECK
from torchtitan.utils.storage import is_url, storage_path

_MAX_CHECKED_FILES = 16
"""Number of a folder's token files that are checked."""


@dataclass(frozen=True)
class NamedModel:
    """The model that the keys describe; empty if there is none."""

    spec: ModelSpec | None = None
    stage_args: tuple[Any, ...] = ()
    """Hyper-parameters in each stage of the data."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts for the rules."""

    @property
    def args(self) -> Any:
        """Hyper-parameters in the first stage of the data; None without a model."""
        return self.stage_args[0] if self.stage_args else None


@dataclass(frozen=True)
class Inputs:
    """Contents of the files."""

    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    """Facts for the rules."""


def open_inputs(config: Config, model: NamedModel, reasons: list[str]) -> Inputs:
    """Open the files that `config` names.

    Args:
        reasons: problems of files are appended to it.
    """
    facts: dict[str, Any] = {"data_problems": dict(_data_problems(config))}
    if model.spec is not None:
        try:
            facts["schedule_file"] = schedule_file(config)
            reasons += _initial_weights_problems(config, model.spec, model.args)
        except ConfigError as error:
            reasons += error.problems
    tokenizer = None
    try:
        tokenizer = build_tokenizer(
            config.model.hf_assets_path,
            tokenizers.maker(config.model.tokenizer, config.custom),
            config.model.end_of_document,
            config.model.chat_template,
        )
        facts["tokenizer"] = tokenizer
        reasons += _end_problems(config, tokenizer)
        reasons += _chat_problems(config, tokenizer, model.args)
        reasons += _prompt_problems(config, tokenizer, model.args)
        reasons += _token_file_problems(config, tokenizer)
    except UserError as error:
        reasons.append(str(error))
    return Inputs(tokenizer, facts)


def hf_weights_folder(config: Config) -> Path:
    """The folder of `checkpoint.initial_load_in_hf`."""
    path = config.checkpoint.initial_load_path
    return storage_path(path) if path else find_asset(config.model.hf_assets_path)


def _initial_weights_problems(config: Config, spec: ModelSpec, args: Any) -> list[str]:
    """Reasons why the run can't start from the Hugging Face folder that it names. Imports torch
    only if it would load the folder: there is one, and no checkpoint to resume from instead.
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


# ---- tokenizer and data


def _end_problems(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Problems of settings that need an end-of-text token, if the tokenizer has none."""
    training = config.training
    needs_end = {
        "training.document_mask": training.document_mask,
        'training.packing = "best_fit"': training.packing == "best_fit",
        "eval.enable": config.eval.enable,
    }
    for key, needs in needs_end.items():
        try:
            if needs:
                tokenizer.end_for(key)
        except UserError as error:
            yield str(error)


def _chat_problems(config: Config, tokenizer: Tokenizer, args: Any) -> Iterator[str]:
    """Reasons why conversations can't be read with the tokenizer."""
    asks = {
        f"{name}.messages_column": section.messages_column is not None
        for name, section in data_sections(config)
    }
    asks |= {"sampling.chat": config.sampling.chat, "eval.chat": config.eval.chat}
    for key in filter(asks.get, asks):
        try:
            vocab_size = Chat(tokenizer, key).vocabulary
            if args is not None and vocab_size > args.vocab_size:
                yield (
                    f"{key}: the chat template writes ids up to {vocab_size - 1}, the model has "
                    f"only {args.vocab_size}; set [model.overrides] vocab_size = {vocab_size}"
                )
        except UserError as error:
            yield str(error)


def _prompt_problems(config: Config, tokenizer: Tokenizer, args: Any) -> Iterator[str]:
    """Reasons why the model can't continue the prompts of samples."""
    sampling = config.sampling
    encoded = encode_prompts(sampling.prompts, tokenizer, "sampling.chat", chat=sampling.chat)
    if args is not None and (prompts := [ids for _, ids in encoded]):
        for problem in prompt_problems(prompts, args.vocab_size, args.max_seq_len):
            yield f"sampling.prompts: {problem}"


def _token_file_problems(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Reasons why local files of ids can't be read. Only a folder's first files are checked."""
    for name, section in data_sections(config):
        path = Path(section.dataset_path or "")
        if not section.dataset_path or data_sources.find(section.dataset):
            continue
        candidates = [path.with_suffix(".bin")] if path.suffix in (".bin", ".idx") else []
        files = sorted(path.glob("*.bin"))[:_MAX_CHECKED_FILES] if path.is_dir() else candidates
        files = list(filter(Path.is_file, files))
        key = f"{name}.dataset_path"
        try:
            sizes = [describe(file, tokenizer, key)[0].tokens for file in files]
            if files and max(sizes) < 2 and len(files) < _MAX_CHECKED_FILES:
                yield no_tokens(files, key)
        except UserError as error:
            yield str(error)


def _data_problems(config: Config) -> Iterator[tuple[str, str]]:
    """The keys of paths that no data can be read from, each with the reason."""
    for name, section in data_sections(config):
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
        if next(matching_files(path, SEARCHED_AT_CHECK, loops=[]), None) is None:
            return f"no file matches {path!r} (relative to {Path.cwd()})"
    except TooManyFilesError as error:
        return f"{error} and finds no file; name a folder closer to the files"
    return None
