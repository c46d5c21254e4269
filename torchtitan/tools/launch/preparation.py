"""Preparation of a project's tokenizer and tokens: the settings that name them, and the commands
that make them, which `init` prints.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from torchtitan.tools.launch.model_choice import DEBUG
from torchtitan.tools.launch.request import Choice, Choices, Request
from torchtitan.utils.errors import ConfigError

_SAMPLE = 2 * 10**9
"""Maximum bytes of text to train a tokenizer on; more text hardly changes it."""
_TOKENIZER_FILES = ("tokenizer.json", "original/tokenizer.model")
_MIN_DOCUMENTS = 20
"""Minimum number of documents for holding some out."""
_MIN_HELD_OUT_SHARE = 0.005
_MAX_HELD_OUT_SHARE = 0.2
_HELD_OUT_DOCUMENTS = 10
"""The share of documents to hold out is the smallest of these that gives about this number of
documents, within the limits.
"""


@dataclass(frozen=True)
class _Tokenizer:
    """The tokenizer of a project."""

    folder: str | None
    """Folder of the tokenizer; None for the shipped one."""
    why: str
    step: str | None = None
    """Command that makes the folder; None if it exists."""


def prepared_settings(request: Request) -> Choices:
    """The settings that name tokenizer, data and held-out data."""
    settings = {}
    tokenizer = _tokenizer(request)
    if tokenizer.folder is not None:
        settings["model.hf_assets_path"] = Choice(tokenizer.folder, tokenizer.why)
    data = request.data
    path = request.path_inside("tokens") if _tokenizes(request) else data.path
    if path:
        reason = f"tokens of {data.path}" if _tokenizes(request) else data.kind
        settings["training.dataset_path"] = Choice(path, reason)
    if not has_held_out(request):
        return settings
    settings["validation.dataset"] = Choice(data.held_out or data.dataset, "the held-out part")
    if held_out := f"{path}-held-out" if _tokenizes(request) else data.held_out_path:
        settings["validation.dataset_path"] = Choice(held_out, "the held-out part")
    return settings


def preparation_commands(request: Request) -> list[str]:
    """Commands that make the files the settings name, in order, each with a comment."""
    tokenizer = _tokenizer(request)
    steps = [tokenizer.step] if tokenizer.step else []
    if _tokenizes(request):
        words = ["tokenize", "--input", request.corpus, "--output", request.folder / "tokens"]
        if path := tokenizer.folder:
            inside = path == request.path_inside("tokenizer")
            words += ["--tokenizer", request.folder / "tokenizer" if inside else path]
        words += _text_column(request)
        if has_held_out(request):
            words += ["--held-out", f"{100 * _held_out_share(request):.2g}%"]
        products = "the tokens, and a held-out part" if has_held_out(request) else "the tokens"
        steps.append(_step("torchtitan", *words, makes=products))
    return steps


def _step(*words: object, makes: str) -> str:
    return f"{shlex.join(map(str, words))}  # {makes}"


def has_held_out(request: Request) -> bool:
    """Whether there is, or will be, held-out data."""
    if not _tokenizes(request):
        return request.data.held_out is not None
    return request.data.documents is None or request.data.documents >= _MIN_DOCUMENTS


def _held_out_share(request: Request) -> float:
    documents = request.data.documents
    share = _HELD_OUT_DOCUMENTS / documents if documents else 0.0
    return min(_MAX_HELD_OUT_SHARE, max(_MIN_HELD_OUT_SHARE, share))


def _tokenizes(request: Request) -> bool:
    """Whether local text is tokenized ahead of training."""
    return request.corpus is not None and request.data.path is not None


def _tokenizer(request: Request) -> _Tokenizer:
    """
    Raises:
        ConfigError: the tokenizer of the token files is unknown.
    """
    model = request.model
    if folder := request.flag_settings.get("model.hf_assets_path"):
        return _Tokenizer(str(folder.value), folder.why)
    if model.folder:
        return _Tokenizer(str(model.folder), "tokenizer, sizes and weights")
    if model.flavor == DEBUG:
        return _Tokenizer(None, "the shipped one")
    tokenizer_folder = request.folder / "tokenizer"
    if _is_tokenizer(tokenizer_folder):
        return _Tokenizer(request.path_inside("tokenizer"), "in the project's folder")
    if model.repository is None:
        entries = model.args.vocab_size
        words = ["tokenizer", request.corpus, "--vocab-size", entries, "--output", tokenizer_folder]
        words += _text_column(request)
        large = request.data.size is None or request.data.size > _SAMPLE
        words += ["--sample", f"{_SAMPLE // 10**9}GB"] if large else []
        return _Tokenizer(
            request.path_inside("tokenizer"),
            f"{entries:,} entries, trained on the data",
            _step("torchtitan", *words, makes="the tokenizer"),
        )
    if model.published and request.data.path and not request.data.corpus:
        raise ConfigError(
            [
                f"--data: {request.data.path} has token files, and {model.name} no tokenizer of "
                "its own; add --model.hf_assets_path with the one that made them"
            ]
        )
    fetched = Path("assets/hf", model.repository.rpartition("/")[2])
    if _is_tokenizer(fetched):
        return _Tokenizer(os.path.abspath(fetched), f"the tokenizer of {model.repository}")
    words = [
        "download",
        model.repository,
        "--include",
        "tokenizer*",
        "--local-dir",
        tokenizer_folder,
    ]
    gated = "; gated: needs an HF_TOKEN with access" if model.is_gated else ""
    return _Tokenizer(
        request.path_inside("tokenizer"),
        f"the tokenizer of {model.repository}",
        _step("hf", *words, makes=f"the tokenizer{gated}"),
    )


def _is_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _text_column(request: Request) -> list[str]:
    column = request.flag_settings.get("training.text_column")
    return ["--text-column", str(column.value)] if column else []
