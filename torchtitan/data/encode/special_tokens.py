"""Which tokens begin and end a document: what the files of a Hugging Face folder say.

`tokenizer_config.json` and `special_tokens_map.json` count, then what the post-processor of
`tokenizer.json` puts around a text. Only where none of them says anything, usual names are looked
for, and only among the added special tokens: an ordinary word may be spelled like one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.utils.errors import UserError
from torchtitan.utils.formats import read_json_object

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
BEGIN_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
END_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")
WITHOUT_END = "-ends-none"
"""Behind the fingerprint of a tokenizer without end-of-text: with one, it would give other ids."""


@dataclass(frozen=True)
class NamedTokens:
    """What the files beside a tokenizer say about its tokens."""

    names: dict[str, str | None]
    """Special tokens by their roles, such as `eos_token`; None: the folder has no such token."""
    added: dict[int, dict[str, Any]]
    """Added tokens by their ids: the fields of tokenizers' `AddedToken`."""
    add_bos: bool
    """False if a text shall not begin with `bos_token`."""
    notes: list[str] = field(default_factory=list)


def named_tokens(tokenizer: Path) -> NamedTokens:
    """Read what is beside a tokenizer's file.

    Raises:
        UserError: a file can't be read, or isn't what it should be.
    """
    config = read_json(tokenizer.with_name(CONFIG))
    in_config = dict(_names(config, tokenizer.with_name(CONFIG)))
    in_map = dict(_names(read_json(tokenizer.with_name(MAP)), tokenizer.with_name(MAP)))
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise UserError(
            f"model.hf_assets_path: {tokenizer.with_name(CONFIG)}: add_bos_token is {add_bos!a}, "
            "must be true or false"
        )
    # as in transformers
    config_counts = "added_tokens_decoder" in config
    notes = [
        f"{tokenizer.parent}: {CONFIG} says that {role} is {in_config[role]}, {MAP} {name}; the "
        f"{'first' if config_counts else 'second'} counts, as in transformers"
        for role, name in in_map.items()
        if role in ("bos_token", "eos_token") and in_config.get(role, name) != name
    ]
    return NamedTokens(
        in_map | in_config if config_counts else in_config | in_map,
        dict(_added(tokenizer, config)),
        add_bos is not False,
        notes,
    )


def around_text(post_processor: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """The special tokens that a post-processor of `tokenizer.json` puts before and behind a
    text; None where it puts none, or several.
    """
    before: list[str] = []
    behind: list[str] = []
    steps = [post_processor or {}]
    steps += steps[0].get("processors", [])
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            parts = step["single"]
            at = next((i for i, part in enumerate(parts) if "Sequence" in part), 0)
            before += [str(part["SpecialToken"]["id"]) for part in parts[:at]]
            behind += [str(part["SpecialToken"]["id"]) for part in parts[at + 1 :]]
        elif step.get("type") in ("BertProcessing", "RobertaProcessing"):
            before.append(str(step["cls"][0]))
            behind.append(str(step["sep"][0]))
    return (before[0] if len(before) == 1 else None, behind[0] if len(behind) == 1 else None)


def choose(
    role: str, named: NamedTokens, around: str | None, usual: Sequence[str], special: Sequence[str]
) -> str | None:
    """The name of the token with a role, `bos_token` or `eos_token`; None if there is none.

    Args:
        around: what the post-processor puts in its place.
        special: the added special tokens.
    """
    if role in named.names:
        return named.names[role]
    return around or next((name for name in usual if name in special), None)


def check_has_no_end(tokenizer: Path, named: NamedTokens, none_inside: bool) -> None:
    """Accept a tokenizer without end-of-text where that is meant: `"eos_token": null`.

    Args:
        none_inside: the tokenizer's file has no such token either.

    Raises:
        UserError: the folder doesn't say so, or the file has one.
    """
    if "eos_token" not in named.names or not none_inside:
        raise UserError(
            f"model.hf_assets_path: {tokenizer} has no end-of-text token; name it as eos_token in "
            f"{CONFIG} (null if it has none at all), or set model.end_of_document"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file.

    Raises:
        UserError: it can't be read.
    """
    try:
        return read_json_object(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"model.hf_assets_path: {error}") from None


def _names(content: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str | None]]:
    for role, value in content.items():
        name = value.get("content") if isinstance(value, dict) else value
        if role in ("bos_token", "eos_token") and not isinstance(name, str | None):
            raise UserError(
                f"model.hf_assets_path: {path}: {role} is {type(name).__name__}, must be a string"
            )
        if role.endswith("_token") and isinstance(name, str | None):
            yield role, name or None


def _added(tokenizer: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The added tokens that `tokenizer_config.json` lists, or else `added_tokens.json`."""
    path = tokenizer.with_name(CONFIG)
    listed = config.get("added_tokens_decoder")
    if not listed:
        path = tokenizer.with_name("added_tokens.json")
        listed = {id: {"content": content} for content, id in read_json(path).items()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        for id, token in listed.items():
            fields = {flag: bool(token[flag]) for flag in flags if flag in token}
            yield int(id), {"content": str(token["content"]), **fields}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"model.hf_assets_path: {path}: the added tokens must be a table of ids and tokens"
        ) from None
