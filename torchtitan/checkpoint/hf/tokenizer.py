"""The tokenizer of an export, written so that other programs get the same ids as training."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.commit import write_json
from torchtitan.data.encode.hugging_face import RANDOM
from torchtitan.data.encode.sentencepiece_files import SentencePieceTokenizer
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
_SPACE = "\u2581"
"""Stands for a space in SentencePiece's tokens."""
_COPIED = (MAP, "chat_template.jinja", "chat_template.json")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write a tokenizer's files so that texts get the same ids as in training, begin-of-text first.

    A registered tokenizer's files are copied, as is a SentencePiece model that can't be converted.

    Args:
        max_length: the model's maximum number of tokens.

    Raises:
        OSError, ValueError, UserError: the tokenizer's files can no longer be read.
    """
    content = _tokenizer_json(tokenizer)
    if content is None:
        for path in tokenizer.files:
            _copy(path, folder)
        _name_the_end(tokenizer, folder)
        return
    assert tokenizer.path is not None
    if isinstance(tokenizer, SentencePieceTokenizer):
        _copy(tokenizer.path, folder)  # for programs that prefer it
    config_file = tokenizer.path.with_name(CONFIG)
    settings = read_json_object(config_file) if config_file.is_file() else {}
    for path in (tokenizer.path.with_name(file) for file in _COPIED):
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes().removeprefix(BOM))
    if tokenizer.chat_template is not None:
        shutil.copyfile(tokenizer.chat_template, folder / "chat_template.jinja")
    content |= {"truncation": None, "padding": None, "post_processor": _post_processor(tokenizer)}
    write_json(folder / "tokenizer.json", content)
    begin, end = (_name(tokenizer, id) for id in (tokenizer.bos_id, tokenizer.eos_id))
    config = tokenizer_config(settings, begin, end, max_length)
    write_json(folder / CONFIG, config)
    _name_the_end(tokenizer, folder)


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """`tokenizer.json` of a built-in tokenizer; None if its files are copied."""
    if type(tokenizer) is TiktokenTokenizer:
        return _tiktoken_json(tokenizer)
    if type(tokenizer) is SentencePieceTokenizer:
        with suppress(Exception):  # an unusual model, or the library protobuf is missing or old
            return _sentencepiece_json(tokenizer)
    if type(tokenizer) is not HuggingFaceTokenizer:
        return None
    assert tokenizer.path is not None
    content = read_json_object(tokenizer.path)
    content["added_tokens"] = [*content.get("added_tokens", []), *tokenizer.added]
    content["model"] |= {name: None for name in RANDOM if name in content["model"]}
    return content


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


def _post_processor(tokenizer: Tokenizer) -> dict[str, Any] | None:
    return post_processor(_name(tokenizer, tokenizer.bos_id), tokenizer.bos_id)


def _copy(path: Path, folder: Path) -> None:
    name = "tokenizer.model" if ".model.v" in path.name else path.name  # as transformers reads it
    with path.open("rb") as original, (folder / name).open("wb") as copy:
        shutil.copyfileobj(original, copy)


def _tiktoken_json(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    """`tokenizer.json` for a tiktoken file: every split of a token into two tokens is a merge."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    characters = _byte_characters()
    ranks = {"".join(characters[b] for b in token): rank for token, rank in tokenizer.ranks.items()}
    backend = Backend(models.BPE(ranks, _merges(ranks), ignore_merges=True))
    if form := tokenizer.spec.normal_form:
        backend.normalizer = getattr(normalizers, form)()
    split = pre_tokenizers.Split(Regex(tokenizer.spec.pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    special = sorted(tokenizer.special.items(), key=lambda item: item[1])
    added_tokens = [_added_token(id, name) for name, id in special]
    return json.loads(backend.to_str()) | {"added_tokens": added_tokens}


def _added_token(id: int, name: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": name, **flags, "special": special}


def _merges(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, the lowest ranks first."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(head, tail) for head, tail in cuts if head in ranks and tail in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _sentencepiece_json(tokenizer: SentencePieceTokenizer) -> dict[str, Any] | None:
    """`tokenizer.json` for a SentencePiece model; None if the ids would differ."""
    from tokenizers import Regex, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    form = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto
    proto = form.FromString(tokenizer.backend.serialized_model_proto())
    training, normalization = proto.trainer_spec, proto.normalizer_spec
    pieces = proto.pieces
    if training.model_type == training.UNIGRAM:
        vocabulary = [(piece.piece, piece.score) for piece in pieces]
        model: Any = models.Unigram(vocabulary, training.unk_id, training.byte_fallback)
    else:
        model = models.BPE(
            {piece.piece: id for id, piece in enumerate(pieces)},
            _merges({piece.piece: -piece.score for piece in pieces if piece.type == piece.NORMAL}),
            unk_token=training.unk_piece,
            fuse_unk=True,
            byte_fallback=training.byte_fallback,
        )
    normalizing: list[Any] = []
    if normalization.precompiled_charsmap:
        normalizing.append(normalizers.Precompiled(normalization.precompiled_charsmap))
    if normalization.remove_extra_whitespaces:
        normalizing += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalization.add_dummy_prefix:
        normalizing.append(normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1))
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([*normalizing, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(decoding)
    content = json.loads(backend.to_str()) | {
        "added_tokens": [
            _added_token(id, piece.piece, special=piece.type != piece.USER_DEFINED)
            for id, piece in enumerate(pieces)
            if piece.type in (piece.UNKNOWN, piece.CONTROL, piece.USER_DEFINED)
        ],
        "post_processor": _post_processor(tokenizer),
    }
    backend = Backend.from_str(json.dumps(content))
    symbols = [f"a{piece.piece}b" for piece in pieces if piece.type == piece.USER_DEFINED]
    texts = (*TEXTS, *symbols[:1])
    problem = differing_text(tokenizer, lambda text: backend.encode(text).ids, texts)
    return content if problem is None else None


def _byte_characters() -> list[str]:
    """The printable character for each byte in byte-level vocabularies, as in GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def differing_text(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]], texts: Sequence[str] = TEXTS
) -> str | None:
    """A description of the first text that `encode` gives other ids than training, or None."""
    for text in texts:
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
