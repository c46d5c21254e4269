"""The tokenizer of an export, written so that other programs get the same ids as training."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.commit import write_json
from torchtitan.data.encode.hugging_face import RANDOM
from torchtitan.data.encode.special_tokens import CONFIG, MAP
from torchtitan.data.encode.tokenizer import HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer
from torchtitan.data.encode.tokenizer_training import post_processor, tokenizer_config
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import BOM
from torchtitan.utils.formats import read_json_object

TEXTS = (
    "",
    "The quick brown fox jumps over 12 lazy dogs, doesn't it?",
    "  two spaces, a\ttab,\r\n\n  and 1234567.89 at the end ",
    "def f(x):\n    return x**2  # naïve, cafe\u0301, Straße",
    "日本語のテキスト и кириллица 🙂🏽",
)
"""The texts on which tokenizers are compared."""
_COPIED = (MAP, "chat_template.jinja", "chat_template.json")
_BUILT_IN = (HuggingFaceTokenizer, TiktokenTokenizer)


def is_built_in(tokenizer: Tokenizer) -> bool:
    """Whether `write_tokenizer` creates the files; files of registered tokenizers are copied."""
    return type(tokenizer) in _BUILT_IN


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write a tokenizer's files so that texts get the same ids as in training, begin-of-text first.

    Args:
        max_length: the model's maximum number of tokens.

    Raises:
        OSError, ValueError, UserError: the tokenizer's files can no longer be read.
    """
    if not is_built_in(tokenizer):
        for path in tokenizer.files:
            _copy(path, folder)
        _name_the_end(tokenizer, folder)
        return
    assert tokenizer.path is not None
    if isinstance(tokenizer, TiktokenTokenizer):
        content = _tiktoken_json(tokenizer)
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        content = read_json_object(tokenizer.path)
        content["added_tokens"] = [*content.get("added_tokens", []), *tokenizer.added]
        content["model"] |= {name: None for name in RANDOM if name in content["model"]}
    config_file = tokenizer.path.with_name(CONFIG)
    settings = read_json_object(config_file) if config_file.is_file() else {}
    for path in (tokenizer.path.with_name(file) for file in _COPIED):
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes().removeprefix(BOM))
    if tokenizer.chat_template is not None:
        shutil.copyfile(tokenizer.chat_template, folder / "chat_template.jinja")
    bos = _name(tokenizer, tokenizer.bos_id)
    content |= {
        "truncation": None,
        "padding": None,
        "post_processor": post_processor(bos, tokenizer.bos_id),
    }
    write_json(folder / "tokenizer.json", content)
    config = tokenizer_config(settings, bos, _name(tokenizer, tokenizer.eos_id), max_length)
    write_json(folder / CONFIG, config)
    _name_the_end(tokenizer, folder)


def _name_the_end(tokenizer: Tokenizer, folder: Path) -> None:
    """Name the token of `model.end_of_document` in the files of an export."""
    for file in (folder / CONFIG, folder / MAP):
        content = read_json_object(file) if file.is_file() else {}
        token = content.get("eos_token")
        if "eos_token" in content and (tokenizer.stop_ids or token is None):
            name = _name(tokenizer, tokenizer.eos_id) or token
            write_json(file, content | {"eos_token": name})


def _name(tokenizer: Tokenizer, id: int | None) -> str | None:
    """The spelling of a special token, if there is one."""
    if id is None:
        return None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return str(tokenizer.backend.id_to_token(id))
    return tokenizer.decode([id])


def _copy(path: Path, folder: Path) -> None:
    with path.open("rb") as original, (folder / path.name).open("wb") as copy:
        shutil.copyfileobj(original, copy)


def _tiktoken_json(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """`tokenizer.json` for a tiktoken file: every split of a token into two tokens is a merge."""
    characters = _byte_characters()
    ranks = tokenizer.ranks
    spelling = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(head, tail) for head, tail in cuts if head in ranks and tail in ranks]
        merges += [
            [spelling[head], spelling[tail]]
            for head, tail in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    special = tokenizer.special
    form = tokenizer.spec.normal_form
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": tokenizer.spec.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": name, **flags}
            for name, id in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": form and {"type": form},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelling[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def _byte_characters() -> list[str]:
    """The printable character for each byte in byte-level vocabularies, as in GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def differing_text(tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> str | None:
    """A description of the first text that `encode` gives other ids than training, or None."""
    for text in TEXTS:
        try:
            expected = tokenizer.encode(text, bos=True)
        except UserError:  # not every vocabulary has all characters
            continue
        ids = encode(text)
        if ids != expected:
            return f"{text!r} becomes {ids[:8]}, in training {expected[:8]}"
    return None


def file_problem(tokenizer: Tokenizer, folder: Path) -> str | None:
    """A description of the first text that the library `tokenizers`, with the folder's
    `tokenizer.json`, gives other ids than training, or None.
    """
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    return differing_text(tokenizer, lambda text: backend.encode(text, add_special_tokens=True).ids)
