"""The tokens that begin and end a document, from the files of a Hugging Face folder.

`tokenizer_config.json` and `special_tokens_map.json` take precedence over the post-processor of
`tokenizer.json`. If none of them names a token, a usual name among the added special tokens is
used, but no ordinary word: a word may be spelled like a special token.
"""

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.utils.errors import UserError
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.limits import TOKEN_IDS

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
BEGIN_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
END_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")


@dataclass(frozen=True)
class FolderTokens:
    """The tokens in the files beside a tokenizer."""

    names: dict[str, str | None]
    """Special tokens by their roles, such as `eos_token`; None: the folder has no such token."""
    added: dict[int, dict[str, Any]]
    """Added tokens by their ids: the fields of tokenizers' `AddedToken`."""
    add_bos: bool
    """False if texts don't begin with `bos_token`."""
    notes: list[str] = field(default_factory=list)


def read_folder_tokens(tokenizer: Path) -> FolderTokens:
    """Read the files beside a tokenizer's file.

    Raises:
        UserError: a file can't be read, or is malformed.
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
    prefer_config = "added_tokens_decoder" in config
    notes = [
        f"{tokenizer.parent}: {CONFIG} says that {role} is {in_config[role]}, {MAP} {name}; the "
        f"{'first' if prefer_config else 'second'} takes precedence, as in transformers"
        for role, name in in_map.items()
        if role in ("bos_token", "eos_token") and in_config.get(role, name) != name
    ]
    return FolderTokens(
        in_map | in_config if prefer_config else in_config | in_map,
        dict(_added(tokenizer, config)),
        add_bos is not False,
        notes,
    )


@dataclass(frozen=True)
class Ends:
    """The tokens that begin and end documents."""

    names: dict[str, str | None]
    """Special tokens by their roles."""
    bos: int | None
    eos: int | None
    stop: tuple[int, ...]
    """The folder's end-of-text, where `model.end_of_document` names the end."""
    fingerprint: str
    """Suffix of the tokenizer's fingerprint: with another end, it gives other ids."""


def resolve_ends(
    path: Path,
    folder_tokens: FolderTokens,
    defaults: tuple[str | None, str | None],
    token_id: Callable[[str], int | None],
    end_of_document: str | None,
) -> Ends:
    """The tokens that begin and end documents, named by `model.end_of_document`, by the folder, or
    else by the tokenizer's file.

    Args:
        defaults: begin-of-text and end-of-text of the tokenizer's file.
        token_id: the id of a token; None if there is no such token.

    Raises:
        UserError: a token is missing, or no file names an end and none sets it to null.
    """

    def id_of(role: str, name: str) -> int:
        if (id := token_id(name)) is None:
            raise UserError(f"model.hf_assets_path: {role} is {name!a}, which {path} doesn't have")
        return id

    names = dict(zip(("bos_token", "eos_token"), defaults, strict=True)) | folder_tokens.names
    begin, end = names["bos_token"], names["eos_token"]
    bos = id_of("bos_token", begin) if begin and folder_tokens.add_bos else None
    eos: int | None = None
    stop: tuple[int, ...] = ()
    fingerprint = ""
    if end_of_document is not None:
        eos = token_id(end_of_document)
        if eos is None:
            raise UserError(f"model.end_of_document: {path} has no token {end_of_document!a}")
        stop = () if end is None else (id_of("eos_token", end),)
        if stop != (eos,):
            fingerprint = f"-ends-{eos}"
    elif end is not None:
        eos = id_of("eos_token", end)
    elif "eos_token" in folder_tokens.names and defaults[1] is None:
        fingerprint = "-ends-none"
    else:
        raise UserError(
            f"model.hf_assets_path: {path} has no end-of-text token; name it as eos_token in "
            f"{CONFIG} (null if it has none at all), or set model.end_of_document"
        )
    return Ends(names, bos, eos, stop, fingerprint)


def tokens_around(
    post_processor: Mapping[str, Any] | None, special: Sequence[str]
) -> tuple[str | None, str | None]:
    """Begin-of-text and end-of-text of a `tokenizer.json`: the special tokens that its
    post-processor puts before and behind a text, or else special tokens with a usual name.

    Args:
        special: the added special tokens.
    """
    before: list[str] = []
    behind: list[str] = []
    steps = [post_processor or {}]
    steps += steps[0].get("processors", [])
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            template = step["single"]
            at = next((i for i, element in enumerate(template) if "Sequence" in element), 0)
            before += [str(element["SpecialToken"]["id"]) for element in template[:at]]
            behind += [str(element["SpecialToken"]["id"]) for element in template[at + 1 :]]
        elif step.get("type") in ("BertProcessing", "RobertaProcessing"):
            before.append(str(step["cls"][0]))
            behind.append(str(step["sep"][0]))
    begin, end = (
        tokens[0]
        if len(tokens) == 1
        else next((name for name in candidates if name in special), None)
        for tokens, candidates in ((before, BEGIN_NAMES), (behind, END_NAMES))
    )
    return begin, end


def read_json(path: Path, key: str = "model.hf_assets_path") -> dict[str, Any]:
    """A JSON object; empty if there is no such file.

    Raises:
        UserError: it can't be read, or has a text that can't be encoded.
    """
    try:
        content = read_json_object(path) if path.exists() else {}
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{key}: {path} has half a surrogate pair in a text") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {error}") from None
    return content


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
    table = config.get("added_tokens_decoder")
    if not table:
        path = tokenizer.with_name("added_tokens.json")
        table = {id: {"content": content} for content, id in read_json(path).items()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        for id, token in table.items():
            fields = {flag: bool(token[flag]) for flag in flags if flag in token}
            yield token_id(id), {"content": str(token["content"]), **fields}
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UserError(
            f"model.hf_assets_path: {path}: the added tokens must be a table of ids below "
            f"{TOKEN_IDS:,} and tokens"
        ) from None


def token_id(number: str | int, most: int = TOKEN_IDS - 1) -> int:
    """A number from a file as a token's id, or as a count of tokens.

    Raises:
        TypeError, ValueError: it can't be one.
    """
    id = int(number) if isinstance(number, str) else operator.index(number)
    if not 0 <= id <= most:
        raise ValueError(f"{str(id)[:20]} is not between 0 and {most:,}")
    return id
