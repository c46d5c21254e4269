"""Files of tokens and ranks, read by `tiktoken`: Llama 3's `.model`, OpenAI's and Qwen's
`.tiktoken`, Kimi's `tiktoken.model`, and Mistral's `tekken.json`.

Except in the last, the pattern that splits text before merging and the special tokens after the
ranks are not in the file. The folder, the file's name and the number of ranks choose among the
specifications in `encodings.toml`; a file that matches none is refused.
"""

import base64
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from torchtitan.data.encode.base import Tokenizer, rust_errors
from torchtitan.data.encode.special_tokens import (
    CONFIG,
    FolderTokens,
    read_folder_tokens,
    read_json,
    resolve_ends,
    token_id,
)
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import BOM
from torchtitan.utils.limits import SPECIAL_TOKENS


@dataclass(frozen=True, kw_only=True)
class EncodingSpec:
    """Pattern and special tokens that a file of ranks does not contain."""

    kind: str
    pattern: str
    """Splits text before merging."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Offsets of special tokens after the ranks."""
    count: int = 0
    """Number of special tokens; the nameless ones are reserved."""
    begin: str | None = None
    end: str
    reserved: str = "<|reserved_special_token_{}|>"
    """Name of a reserved token, by a number."""
    number_is_id: bool = False
    """Whether the number is the id, rather than an index of reserved tokens."""
    normal_form: str | None = None
    """The normal form of Unicode in which text is encoded."""
    file: str = ""
    """Name of its files, if others don't have it."""
    ranks: int = 0
    """Number of ranks in its files, if others don't have it."""

    def special_ids(self, ranks: int) -> dict[str, int]:
        names = {offset: name for name, offset in self.special.items()}
        nameless = [offset for offset in range(self.count) if offset not in names]
        for number, offset in enumerate(nameless):
            names[offset] = self.reserved.format(ranks + offset if self.number_is_id else number)
        return {name: ranks + offset for offset, name in sorted(names.items())}


_TABLE = Path(__file__).with_name("encodings.toml").read_text(encoding="utf-8")
ENCODINGS = {kind: EncodingSpec(kind=kind, **each) for kind, each in tomli.loads(_TABLE).items()}
_GENERAL = (
    "",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
)
"""Classes in `tokenizer_config.json` that don't identify a file of ranks."""
_ALL_KINDS = "aA1 \n\t_-\u00e9q\u0301\u4e2d\U0001f680\x00"
"""A text with characters of all kinds, in the normal form NFC."""


class TiktokenTokenizer(Tokenizer):
    """A file of tokens and ranks."""

    eos_id: int

    def __init__(self, path: Path, end_of_document: str | None = None):
        """
        Args:
            end_of_document: the token that ends documents, instead of the folder's.

        Raises:
            UserError: it is damaged, matches no specification, or lacks a token.
        """
        import tiktoken

        folder_tokens = read_folder_tokens(path)
        if path.name == "tekken.json":
            self.ranks, self.spec, special = _read_tekken(path)
        else:
            self.ranks = _read_ranks(path)
            self.spec = _find_spec(path, len(self.ranks))
            special = _special(self.spec, len(self.ranks), folder_tokens, path)
        super().__init__(path)
        with rust_errors(path, "can't be used"):
            self.backend = tiktoken.Encoding(
                path.stem,
                pat_str=self.spec.pattern,
                mergeable_ranks=self.ranks,
                special_tokens=special,
            )
            if self.decode(self._ids(_ALL_KINDS)) != _ALL_KINDS:
                raise ValueError("the pattern that splits texts drops a part of them")
        self.special = special
        self.vocab_size = self.backend.max_token_value + 1
        if folder_tokens.names.get("eos_token") is None:
            folder_tokens.names.pop("eos_token", None)
        defaults = self.spec.begin, self.spec.end
        self.set_ends(resolve_ends(path, folder_tokens, defaults, special.get, end_of_document))
        self.notes = (f"{path} is read by the rules of {self.spec.kind}", *folder_tokens.notes)

    @property
    def text_size(self) -> int:
        return max(*self.ranks.values(), self.eos_id, self.bos_id or 0) + 1

    def _normal(self, text: str) -> str:
        form: Any = self.spec.normal_form
        return unicodedata.normalize(form, text) if form else text

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(self._normal(text), disallowed_special=())

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        encode = self.backend.encode_to_numpy
        return (encode(self._normal(text), disallowed_special=()) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids))

    def _byte_lengths(self) -> dict[int, int]:
        return {id: len(token) for token, id in self.ranks.items()}


def _find_spec(path: Path, ranks: int) -> EncodingSpec:
    """The specification of a file with this number of ranks.

    Raises:
        UserError: there is none.
    """
    config = read_json(path.with_name(CONFIG))
    kind = str(config.get("tokenizer_class") or "")
    code = str(config.get("auto_map", ""))
    spec: EncodingSpec | None
    if kind in _GENERAL:
        model = read_json(path.with_name("config.json")).get("model_type")
        by_ranks = {each.ranks: each for each in ENCODINGS.values()}
        by_file = {each.file: each for each in ENCODINGS.values()}
        spec = by_file.get(path.name, by_ranks.get(ranks))
        if (
            spec is None
            and path.suffix == ".model"
            and model in (None, "llama")
            and ranks < 128_000
        ):
            spec = ENCODINGS["Llama 3"]  # of another size
        if spec is ENCODINGS["GPT-4o"] and model == "gpt_oss":
            spec = ENCODINGS["gpt-oss"]
    elif kind == "TikTokenTokenizer" and ("kimi" in code or "moonshot" in code):
        spec = ENCODINGS["Kimi"]
    else:
        spec = ENCODINGS["Qwen"] if kind == "QWenTokenizer" else None
    if spec is not None:
        return spec
    whose = f"{ranks:,} ranks" if kind in _GENERAL else f"the class {kind}"
    raise UserError(
        f"model.hf_assets_path: {path} is a tiktoken file of {whose}, which doesn't say how its "
        "text is split and which special tokens it has, and those rules aren't known here; make a "
        "tokenizer.json of it: transformers.integrations.tiktoken.convert_tiktoken_to_fast does, "
        "with the tiktoken.Encoding of the model's own code"
    )


def _special(
    spec: EncodingSpec, ranks: int, folder_tokens: FolderTokens, path: Path
) -> dict[str, int]:
    """The special tokens, with the folder's names in place of the specification's."""
    names = {id: name for name, id in spec.special_ids(ranks).items()}
    for id, token in folder_tokens.added.items():
        if id < ranks:
            raise UserError(
                f"model.hf_assets_path: {path.with_name(CONFIG)} gives {token['content']!a} the id "
                f"{id}, which {path.name} has for a piece of text"
            )
        names[id] = token["content"]
    return {name: id for id, name in names.items()}


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and ranks of a tiktoken file. (tiktoken's reader would miss a changed file.)"""
    start = f"model.hf_assets_path: {path} is not a tiktoken model: "
    try:
        content = path.read_bytes().removeprefix(BOM)
        lines = [line.split() for line in content.splitlines() if line]
        pairs = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in lines]
    except ValueError:
        raise UserError(
            f"{start}each line must be a token in base64 and its rank. It may be of another kind: "
            "a tokenizer.json is read as well"
        ) from None
    _check_ranks(pairs, start)
    return dict(pairs)


def _check_ranks(pairs: Sequence[tuple[bytes, int]], start: str) -> None:
    """
    Raises:
        UserError: the ranks aren't 0, 1, 2 and so on, or don't encode every text.
    """
    ranks = sorted(rank for _, rank in pairs)
    tokens = {token for token, _ in pairs}
    if len(set(ranks)) < len(ranks) or len(tokens) < len(pairs):
        raise UserError(f"{start}a token or a rank is there twice")
    if not ranks or ranks != list(range(len(ranks))):
        raise UserError(f"{start}ranks are missing (truncated?)")
    if any(bytes([i]) not in tokens for i in range(256)):
        raise UserError(f"{start}it lacks tokens of single bytes, so it can't encode every text")


def _read_tekken(path: Path) -> tuple[dict[bytes, int], EncodingSpec, dict[str, int]]:
    """Tokens and their ids, specification and special tokens of Mistral's `tekken.json`."""
    content = read_json(path)
    start = f"model.hf_assets_path: {path} is not Mistral's tekken.json: "
    try:
        config = content["config"]
        first = token_id(config["default_num_special_tokens"], SPECIAL_TOKENS)
        count = token_id(config["default_vocab_size"]) - first
        entries = content["vocab"][: max(count, 0)]
        pairs = [
            (base64.b64decode(e["token_bytes"], validate=True), token_id(e["rank"]))
            for e in entries
        ]
        names = {0: "<unk>", 1: "<s>", 2: "</s>"}
        for token in content.get("special_tokens") or []:
            names[token_id(token["rank"])] = str(token["token_str"])
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{start}{type(error).__name__}: {error}") from None
    _check_ranks(pairs, start)
    special = {names.get(id, f"<SPECIAL_{id}>"): id for id in range(first)}
    spec = EncodingSpec(kind="Mistral's tekken.json", pattern=pattern, begin="<s>", end="</s>")
    return {token: first + rank for token, rank in pairs}, spec, special
