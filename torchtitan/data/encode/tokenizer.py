"""Opening a tokenizer: Hugging Face's `tokenizer.json`, SentencePiece's or tiktoken's `.model`,
Mistral's `tekken.json`, or a registered one. Imports no torch.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchtitan.data.encode.base import (
    CONTINUES,
    LONG,
    PIECE,
    PLAIN,
    UNPREDICTED,
    Origin,
    Tokenizer,
    flagged,
    pieces,
    rust_errors,
)
from torchtitan.data.encode.hugging_face import HuggingFaceTokenizer
from torchtitan.data.encode.sentencepiece_files import SentencePieceTokenizer, is_sentencepiece
from torchtitan.data.encode.tiktoken_files import TiktokenTokenizer
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import regular_handle
from torchtitan.utils.limits import TOKEN_IDS

__all__ = [
    "CONTINUES",
    "LONG",
    "PIECE",
    "PLAIN",
    "UNPREDICTED",
    "HuggingFaceTokenizer",
    "Origin",
    "TiktokenTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "flagged",
    "pieces",
    "rust_errors",
    "tokenizer_file",
]
FILES = ("tokenizer.json", "*.model", "tekken.json", "*.tiktoken", "*.model.v*")
"""Tokenizers of a folder, the first one that is there."""
_OLD_FILES = ("vocab.json", "merges.txt", "vocab.txt")
"""Files of tokenizers that can't be read."""


def build_tokenizer(
    hf_assets_path: str,
    make: Callable[[Path], Tokenizer] | None = None,
    end_of_document: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """Open the tokenizer in a folder or its `original/`, or the file that the path names.

    A token that would both begin and end documents only ends them.

    Args:
        make: constructor of a registered tokenizer, called with the path.
        end_of_document: the token that ends documents; None: the folder's.
        chat_template: file of the chat template; None: the folder's.

    Raises:
        UserError: no such folder, no tokenizer in it, a damaged one, or one without that token.
    """
    path = find_asset(hf_assets_path)
    if make is not None:
        tokenizer = make(path)
        if problem := _incomplete(tokenizer):
            raise UserError(f"model.tokenizer: {type(tokenizer).__name__} {problem}")
        if end_of_document is not None:
            raise UserError(
                f"model.end_of_document: {type(tokenizer).__name__} is registered by your module, "
                "and sets eos_id itself; remove the key"
            )
    elif file := tokenizer_file(path):
        tokenizer = _open(file, end_of_document)
    else:
        reason = f"holds no tokenizer ({', '.join(FILES)})" if path.is_dir() else "does not exist"
        if old := ", ".join(name for name in _OLD_FILES if (path / name).is_file()):
            reason += (
                f". Make a tokenizer.json of {old} with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise UserError(
            f"model.hf_assets_path: {hf_assets_path} {reason}; scripts/download_hf_assets.py of "
            "the repository downloads a model's tokenizer; ./tests/assets/tokenizer ships with the "
            "package"
        )
    if tokenizer.vocab_size > TOKEN_IDS:
        raise UserError(
            f"model.hf_assets_path: the tokenizer of {hf_assets_path} has the id "
            f"{tokenizer.vocab_size - 1:,}; ids must be below {TOKEN_IDS:,}"
        )
    if tokenizer.bos_id == tokenizer.eos_id:
        tokenizer.bos_id = None
    tokenizer.chat_template = Path(chat_template) if chat_template is not None else None
    tokenizer.origin = build_tokenizer, (hf_assets_path, make, end_of_document, chat_template)
    return tokenizer


def _open(file: Path, end_of_document: str | None) -> Tokenizer:
    try:
        os.close(regular_handle(file, links=True))
    except OSError as error:
        raise UserError(f"model.hf_assets_path: {file}: {error.strerror}") from None
    if file.suffix == ".json" and file.name != "tekken.json":
        return HuggingFaceTokenizer(file, end_of_document)
    if is_sentencepiece(file):
        return SentencePieceTokenizer(file, end_of_document)
    return TiktokenTokenizer(file, end_of_document)


def tokenizer_file(path: Path) -> Path | None:
    """The tokenizer's file in a folder or its `original/`, or the file at `path`; None if there
    is none.
    """
    candidates: Iterator[Path] = iter([path])
    if path.is_dir():
        folders = (path, path / "original")
        candidates = (
            file for folder in folders for name in FILES for file in sorted(folder.glob(name))
        )
    return next(filter(Path.is_file, candidates), None)


def _incomplete(tokenizer: object) -> str | None:
    """The first problem of a registered tokenizer; None if it has none."""
    if not isinstance(tokenizer, Tokenizer):
        return "must be a subclass of torchtitan.data.encode.tokenizer.Tokenizer"
    kinds: dict[str, Any] = {
        "vocab_size": int,
        "bos_id": int | None,
        "eos_id": int | None,
        "fingerprint": str,
    }
    for name, kind in kinds.items():
        value = getattr(tokenizer, name, "nothing")
        if not hasattr(tokenizer, name) or not isinstance(value, kind):
            return f"must set {name}, {getattr(kind, '__name__', kind)}; got {value!r}"
    ids = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
    if not all(0 <= i < tokenizer.vocab_size for i in ids):
        return (
            f"has the special ids {ids}, which must be below its vocab_size {tokenizer.vocab_size}"
        )
    return None
