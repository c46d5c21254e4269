"""Files of tokens and ranks, read by `tiktoken`: Llama 3's `.model`, OpenAI's and Qwen's
`.tiktoken`, Kimi's `tiktoken.model`, and Mistral's `tekken.json`.

But for the last, such a file doesn't say how text is split before merging, nor which special tokens
follow the ranks. What the folder, the file's name and the number of ranks say chooses among the
rules that are known here; a file of unknown rules is refused.
"""

import base64
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.data.encode.base import Tokenizer
from torchtitan.data.encode.special_tokens import (
    CONFIG,
    NamedTokens,
    named_tokens,
    read_json,
    resolve_ends,
)
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import BOM

LLAMA3_SPECIAL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    5: "<|step_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
"""Named special tokens by their place after the ranks; the rest of the 256 are reserved."""

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"  # noqa: E501
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before byte-pair merging."""

QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
"""How Qwen 2 splits text: as Llama 3, with every digit by itself."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(upper: str, lower: str) -> str:
    """Words of small letters after capital ones, or of capital ones."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{_ENDING}|{before}{upper}+{lower}*{_ENDING}"


O200K_PATTERN = (
    _cased(f"[{_UPPER}]", f"[{_LOWER}]")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_PATTERN = (
    r"[\p{Han}]+|"
    + _cased(rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HARMONY = {
    **dict(enumerate(["<|startoftext|>", "<|endoftext|>"])),
    4: "<|return|>",
    5: "<|constrain|>",
    7: "<|channel|>",
    8: "<|start|>",
    9: "<|end|>",
    10: "<|message|>",
    14: "<|call|>",
    20: "<|endofprompt|>",
}


@dataclass(frozen=True)
class Rules:
    """What a file of ranks doesn't say."""

    kind: str
    pattern: str
    """How text is split before merging."""
    special: Mapping[int, str]
    """Special tokens by their place after the ranks."""
    count: int
    """Number of special tokens; the nameless ones are reserved."""
    begin: str | None
    end: str
    reserved: str = "<|reserved_special_token_{}|>"
    """Their names, by a number."""
    by_place: bool = False
    """Whether the number is the id, rather than counted."""
    normal_form: str | None = None
    """The normal form of Unicode in which text is encoded."""

    def special_ids(self, ranks: int) -> dict[str, int]:
        names = dict(self.special)
        nameless = [place for place in range(self.count) if place not in names]
        for number, place in enumerate(nameless):
            names[place] = self.reserved.format(ranks + place if self.by_place else number)
        return {name: ranks + place for place, name in sorted(names.items())}


LLAMA3 = Rules(
    "Llama 3", LLAMA3_PATTERN, LLAMA3_SPECIAL, 256, "<|begin_of_text|>", "<|end_of_text|>"
)
QWEN = Rules(
    "Qwen",
    QWEN2_PATTERN,
    dict(enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])),
    208,
    None,
    "<|endoftext|>",
    "<|extra_{}|>",
    normal_form="NFC",
)
KIMI = Rules(
    "Kimi",
    KIMI_PATTERN,
    {0: "[BOS]", 1: "[EOS]"},
    256,
    "[BOS]",
    "[EOS]",
    "<|reserved_token_{}|>",
    True,
)
HARMONY = Rules(
    "gpt-oss", O200K_PATTERN, _HARMONY, 21, "<|startoftext|>", "<|return|>", "<|reserved_{}|>", True
)
END = "<|endoftext|>"
O200K = Rules("GPT-4o", O200K_PATTERN, {1: END, 20: "<|endofprompt|>"}, 21, None, END)
CL100K = Rules(
    "GPT-4",
    LLAMA3_PATTERN,
    {1: END, 2: "<|fim_prefix|>", 3: "<|fim_middle|>", 4: "<|fim_suffix|>", 20: "<|endofprompt|>"},
    21,
    None,
    END,
)
GPT2 = Rules("GPT-2", GPT2_PATTERN, {0: END}, 0, None, END)
_BY_CLASS = {"QWenTokenizer": QWEN}
_BY_FILE = {
    "qwen.tiktoken": QWEN,
    "o200k_base.tiktoken": O200K,
    "cl100k_base.tiktoken": CL100K,
    "r50k_base.tiktoken": GPT2,
}
_BY_RANKS = {
    128_000: LLAMA3,
    151_643: QWEN,
    163_584: KIMI,
    199_998: O200K,
    100_256: CL100K,
    50_256: GPT2,
}
_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast")
"""Classes in `tokenizer_config.json` that say nothing about a file of ranks."""


class TiktokenTokenizer(Tokenizer):
    """A file of tokens and ranks."""

    eos_id: int

    def __init__(self, path: Path, end_of_document: str | None = None):
        """
        Args:
            end_of_document: the token that ends documents, instead of the folder's.

        Raises:
            UserError: it is damaged, its rules aren't known, or it lacks a token.
        """
        import tiktoken

        named = named_tokens(path)
        if path.name == "tekken.json":
            self.ranks, self.rules, special = _read_tekken(path)
        else:
            self.ranks = _read_ranks(path)
            self.rules = _find_rules(path, len(self.ranks))
            special = _special(self.rules, len(self.ranks), named, path)
        super().__init__(path)
        self.backend = tiktoken.Encoding(
            path.stem,
            pat_str=self.rules.pattern,
            mergeable_ranks=self.ranks,
            special_tokens=special,
        )
        self.special = special
        self.vocab_size = self.backend.max_token_value + 1
        if named.names.get("eos_token") is None:
            named.names.pop("eos_token", None)
        defaults = self.rules.begin, self.rules.end
        self.set_ends(resolve_ends(path, named, defaults, special.get, end_of_document))
        self.notes = (f"{path} is read by the rules of {self.rules.kind}", *named.notes)

    @property
    def text_size(self) -> int:
        return max(*self.ranks.values(), self.eos_id, self.bos_id or 0) + 1

    def _normal(self, text: str) -> str:
        form: Any = self.rules.normal_form
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


def _find_rules(path: Path, ranks: int) -> Rules:
    """
    Raises:
        UserError: they aren't known.
    """
    config = read_json(path.with_name(CONFIG))
    kind = config.get("tokenizer_class")
    code = str(config.get("auto_map", ""))
    rules: Rules | None
    if kind is None or kind in _GENERAL:
        model = read_json(path.with_name("config.json")).get("model_type")
        rules = _BY_FILE.get(path.name, _BY_RANKS.get(ranks))
        if (
            rules is None
            and path.suffix == ".model"
            and model in (None, "llama")
            and ranks < 128_000
        ):
            rules = LLAMA3  # of another size
        if rules is O200K and model == "gpt_oss":
            rules = HARMONY
    elif kind == "TikTokenTokenizer" and ("kimi" in code or "moonshot" in code):
        rules = KIMI
    else:
        rules = _BY_CLASS.get(kind)
    if rules is not None:
        return rules
    whose = f"the class {kind}" if kind not in (None, *_GENERAL) else f"{ranks:,} ranks"
    raise UserError(
        f"model.hf_assets_path: {path} is a tiktoken file of {whose}, which doesn't say how its "
        "text is split and which special tokens it has, and those rules aren't known here; make a "
        "tokenizer.json of it: transformers.integrations.tiktoken.convert_tiktoken_to_fast does, "
        "with the tiktoken.Encoding of the model's own code"
    )


def _special(rules: Rules, ranks: int, named: NamedTokens, path: Path) -> dict[str, int]:
    """The special tokens: the folder's names take the places that the rules have for them."""
    names = {id: name for name, id in rules.special_ids(ranks).items()}
    for id, token in named.added.items():
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
    known = {token for token, _ in pairs}
    if len(set(ranks)) < len(ranks) or len(known) < len(pairs):
        raise UserError(f"{start}a token or a rank is there twice")
    if not ranks or ranks != list(range(len(ranks))):
        raise UserError(f"{start}ranks are missing (truncated?)")
    if any(bytes([i]) not in known for i in range(256)):
        raise UserError(f"{start}it lacks tokens of single bytes, so it can't encode every text")


def _read_tekken(path: Path) -> tuple[dict[bytes, int], Rules, dict[str, int]]:
    """Tokens and their ids, rules and special tokens of Mistral's `tekken.json`."""
    content = read_json(path)
    start = f"model.hf_assets_path: {path} is not Mistral's tekken.json: "
    try:
        config = content["config"]
        first = int(config["default_num_special_tokens"])
        entries = content["vocab"][: int(config["default_vocab_size"]) - first]
        pairs = [(base64.b64decode(e["token_bytes"], validate=True), e["rank"]) for e in entries]
        names = dict(_tekken_special(content.get("special_tokens") or []))
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{start}{type(error).__name__}: {error}") from None
    _check_ranks(pairs, start)
    special = {names.get(id, f"<SPECIAL_{id}>"): id for id in range(first)}
    rules = Rules("Mistral's tekken.json", pattern, {}, 0, "<s>", "</s>")
    return {token: first + rank for token, rank in pairs}, rules, special


def _tekken_special(listed: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    yield from enumerate(("<unk>", "<s>", "</s>"))
    for token in listed:
        yield int(token["rank"]), str(token["token_str"])
