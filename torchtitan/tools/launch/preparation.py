"""What a project needs before it trains, a tokenizer and tokens with a held-out part: the settings
that name it, and the commands that make it.

`init` prints these commands, or runs them: `--prepare`.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from torchtitan.tools.launch.model_choice import DEBUG
from torchtitan.tools.launch.request import Choice, Choices, Request
from torchtitan.utils.errors import ConfigError

_SAMPLE = 2 * 10**9
"""Bytes of text from which a tokenizer is trained; more hardly change it."""
_TOKENIZER_FILES = ("tokenizer.json", "original/tokenizer.model")
_FEWEST = 20
"""Documents from which some can be held out."""
_HELD_OUT = 0.005
_MOST_HELD_OUT = 0.2
_HELD_OUT_DOCUMENTS = 10
"""Share of the documents to hold out: so small of a large corpus, and of a small one enough for
about so many documents.
"""


@dataclass(frozen=True)
class Step:
    """A command that makes a part of a project; as text, a line for a shell."""

    words: tuple[str, ...]
    makes: str

    def __str__(self) -> str:
        return f"{shlex.join(self.words)}  # {self.makes}"


@dataclass(frozen=True)
class _Tokenizer:
    """The tokenizer of a project."""

    folder: str | None
    """None: the shipped one."""
    why: str
    step: Step | None = None
    """What makes the folder, unless it is there."""


def prepared_settings(request: Request) -> Choices:
    """The settings that name tokenizer, data and held-out data."""
    settings = {}
    tokenizer = _tokenizer(request)
    if tokenizer.folder is not None:
        settings["model.hf_assets_path"] = Choice(tokenizer.folder, tokenizer.why)
    data = request.data
    path = request.inside("tokens") if _tokenizes(request) else data.path
    if path:
        of = f"tokens of {data.path}" if _tokenizes(request) else data.kind
        settings["training.dataset_path"] = Choice(path, of)
    if not has_held_out(request):
        return settings
    settings["validation.dataset"] = Choice(data.held_out or data.dataset, "the held-out part")
    if held_out := f"{path}-held-out" if _tokenizes(request) else data.held_out_path:
        settings["validation.dataset_path"] = Choice(held_out, "the held-out part")
    return settings


def prepared_by(request: Request) -> list[Step]:
    """The commands that make what the settings name, in order."""
    tokenizer = _tokenizer(request)
    steps = [tokenizer.step] if tokenizer.step else []
    if _tokenizes(request):
        words = ["tokenize", "--input", request.corpus, "--output", request.folder / "tokens"]
        words += ["--tokenizer", _near(tokenizer.folder, request)] if tokenizer.folder else []
        words += [*_text_column(request), "--drop-duplicates"]
        if has_held_out(request):
            words += ["--held-out", f"{100 * _held_out_share(request):.2g}%"]
        parts = "the tokens, and a held-out part" if has_held_out(request) else "the tokens"
        steps.append(_step("torchtitan", *words, makes=parts))
    return steps


def _step(*words: object, makes: str) -> Step:
    return Step(tuple(map(str, words)), makes)


def has_held_out(request: Request) -> bool:
    """Whether there is, or will be, held-out data."""
    if not _tokenizes(request):
        return request.data.held_out is not None
    return request.data.documents is None or request.data.documents >= _FEWEST


def _held_out_share(request: Request) -> float:
    documents = request.data.documents
    wanted = _HELD_OUT_DOCUMENTS / documents if documents else 0.0
    return min(_MOST_HELD_OUT, max(_HELD_OUT, wanted))


def _tokenizes(request: Request) -> bool:
    """Whether text of one's own is tokenized ahead."""
    return request.corpus is not None and request.data.path is not None


def _tokenizer(request: Request) -> _Tokenizer:
    """
    Raises:
        ConfigError: nobody can know which.
    """
    model = request.model
    if given := (request.given or {}).get("model.hf_assets_path"):
        return _Tokenizer(str(given.value), given.why)
    if model.folder:
        return _Tokenizer(str(model.folder), "tokenizer, sizes and weights")
    if model.flavor == DEBUG:
        return _Tokenizer(None, "the shipped one")
    own = request.folder / "tokenizer"
    if _is_tokenizer(own):
        return _Tokenizer(request.inside("tokenizer"), "in the project's folder")
    if model.repository is None:
        entries = model.args.vocab_size
        words = ["tokenizer", request.corpus, "--vocab-size", entries, "--output", own]
        words += _text_column(request)
        large = request.data.size is None or request.data.size > _SAMPLE
        words += ["--sample", f"{_SAMPLE // 10**9}GB"] if large else []
        return _Tokenizer(
            request.inside("tokenizer"),
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
    words = ["download", model.repository, "--include", "tokenizer*", "--local-dir", own]
    gated = "; gated: needs an HF_TOKEN with access" if model.is_gated else ""
    return _Tokenizer(
        request.inside("tokenizer"),
        f"the tokenizer of {model.repository}",
        _step("hf", *words, makes=f"the tokenizer{gated}"),
    )


def _is_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _near(path: str, request: Request) -> str:
    """The path as a command names it, beside the project's folder."""
    if path == request.inside("tokenizer"):
        return str(request.folder / "tokenizer")
    return path


def _text_column(request: Request) -> list[str]:
    given = (request.given or {}).get("training.text_column")
    return ["--text-column", str(given.value)] if given else []
