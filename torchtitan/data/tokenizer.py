"""Tokenizers: Hugging Face's `tokenizer.json` or Llama 3's tiktoken `.model`.

Text never becomes a special token; only `bos` and `eos` add those. Imports no torch.
"""

import base64
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.pieces import LLAMA3_PATTERN, pieces, separable
from torchtitan.data.records import LongText, Text
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import UserError
from torchtitan.utils.json_files import read_json_object

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
"""The named ones of Llama 3's 256 special tokens, counted from the end of the ranks; the others are reserved."""

_WHOLE = 10_000_000
"""Characters of the longest text that is encoded whole, which takes about 0.6 KB of memory each."""

_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")


class Tokenizer(ABC):
    """Text to token ids and back."""

    vocab_size: int
    """Largest id plus one."""
    bos_id: int | None
    eos_id: int

    def __init__(self, path: Path):
        self.path = path
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
        """Hash of the tokenizer's file: the same hash means the same ids."""

    separable = True
    """Whether a long text can be encoded in pieces."""

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of `text`, between the special tokens asked for. A long text is encoded in pieces, with the same ids.

        Raises:
            UserError: the tokenizer fails on this text, or the text is too long for one that can't encode pieces.
        """
        if not self.separable and len(text) > _WHOLE:
            raise UserError(
                f"model.hf_assets_path: {self.path} needs whole texts in memory, and one has {len(text):,} characters "
                f"({_WHOLE:,} at most); split it into several documents"
            )
        start = [self.bos_id] if bos and self.bos_id is not None else []
        with _rust_errors(self.path, "can't encode a text"):
            ids = [i for piece in (pieces(text) if self.separable else [text]) for i in self._ids(piece)]
        return [*start, *ids, *([self.eos_id] if eos else [])]

    @abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Ids of `text` in one go."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out."""

    def encode_document(self, text: str) -> list[int]:
        """A document as training sees it: begin-of-text (if the tokenizer has it), text, end-of-text."""
        return self.encode(text, bos=self.bos_id is not None, eos=True)

    def encode_in_pieces(self, text: Text, start: int = 0) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The ids of a document, of a long one piece by piece, each with its position in the text.

        Args:
            start: the position of the first piece to encode, from an earlier call.
        """
        if not isinstance(text, LongText) or not self.separable:
            yield 0, np.asarray(self.encode_document(str(text)), np.int64)
            return
        for piece in pieces(text.parts(start)):
            ids = np.asarray(self.encode(piece, bos=start == 0), np.int64)
            if len(ids):
                yield start, ids
            start += text.size(piece)
        yield start, np.array([self.eos_id])

    def encode_batch(self, texts: Sequence[str], dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """The documents `texts` as training sees them, in fewer steps than one by one."""
        first = 0 if self.bos_id is None else 1
        out = []
        with _rust_errors(self.path, "can't encode a text"):
            for ids in self._batch_ids(texts):
                document = np.empty(first + len(ids) + 1, dtype)
                document[:first], document[first:-1], document[-1] = self.bos_id or 0, ids, self.eos_id
                out.append(document)
        return out

    @abstractmethod
    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Ids of each text."""

    @property
    def files(self) -> list[Path]:
        """The files an export needs for others to use the tokenizer."""
        names = ("tokenizer_config.json", "special_tokens_map.json")
        return [self.path, *(p for n in names if (p := self.path.with_name(n)).is_file())]

    def __reduce__(self) -> tuple[Callable[..., "Tokenizer"], tuple[str]]:
        return build_tokenizer, (str(self.path),)  # worker processes read the file again


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, read by the `tokenizers` library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Backend

        with _rust_errors(path, "is not a tokenizer"):
            self.backend = Backend.from_file(str(path))
        super().__init__(path)
        # The spelling of a special token in a text stays text.
        self.backend.encode_special_tokens = True
        # Some files have these settings for fine-tuning; they would truncate documents.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.separable = separable(self.backend)
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        config = _read_json(path.with_name("tokenizer_config.json"))
        self.bos_id = self._special(config, "bos_token", _BOS_NAMES)
        eos = self._special(config, "eos_token", _EOS_NAMES)
        if eos is None:
            raise UserError(
                f"model.hf_assets_path: {path} has no end-of-text token; name it as eos_token in tokenizer_config.json"
            )
        self.eos_id = eos

    def _special(self, config: dict[str, Any], key: str, usual: Sequence[str]) -> int | None:
        name = config.get(key)
        name = name.get("content") if isinstance(name, dict) else name
        if not isinstance(name, str | None):
            where = self.path.with_name("tokenizer_config.json")
            raise UserError(f"model.hf_assets_path: {where}: {key} is {type(name).__name__}, must be a string")
        ids = (self.backend.token_to_id(n) for n in ((name,) if name else usual))
        return next((i for i in ids if i is not None), None)

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        # Without the places of tokens in the text.
        encode = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)
        return (encoding.ids for encoding in encode(list(texts), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)


class TiktokenTokenizer(Tokenizer):
    """Llama 3's `.model`: lines of a base64 token and its rank, read by `tiktoken`."""

    def __init__(self, path: Path):
        import tiktoken

        ranks = _read_ranks(path)
        super().__init__(path)
        reserved = iter(f"<|reserved_special_token_{i}|>" for i in range(256))
        names = [LLAMA3_SPECIAL.get(i) or next(reserved) for i in range(256)]
        special = {name: len(ranks) + i for i, name in enumerate(names)}
        self.backend = tiktoken.Encoding(
            path.stem, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = self.backend.n_vocab
        self.bos_id, self.eos_id = special["<|begin_of_text|>"], special["<|end_of_text|>"]

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, disallowed_special=())

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        return (self.backend.encode_to_numpy(text, disallowed_special=()) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids))


def build_tokenizer(hf_assets_path: str) -> Tokenizer:
    """Open the tokenizer in a folder or its `original/`, or the file that the path names.

    Raises:
        UserError: no such folder, no tokenizer in it, or a damaged one.
    """
    path = find_asset(hf_assets_path)
    folders = [path, path / "original"] if path.is_dir() else []
    found = [path] if path.is_file() else [f for d in folders for f in (d / "tokenizer.json", *d.glob("*.model"))]
    for file in found:
        if file.is_file():
            return HuggingFaceTokenizer(file) if file.suffix == ".json" else TiktokenTokenizer(file)
    reason = "holds neither tokenizer.json nor a tiktoken .model file" if path.is_dir() else "does not exist"
    raise UserError(
        f"model.hf_assets_path: {hf_assets_path} {reason}; "
        "scripts/download_hf_assets.py of the repository downloads a model's tokenizer; ./tests/assets/tokenizer ships "
        "with the package"
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and ranks of a tiktoken file. (tiktoken's own reader caches by path and would miss a changed file.)"""
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("ranks are missing (truncated?)")
        if any(bytes([i]) not in ranks for i in range(256)):
            raise ValueError("it lacks tokens of single bytes, so it can't encode every text")
    except ValueError as error:
        raise UserError(f"model.hf_assets_path: {path} is not a tiktoken model: {error}") from None
    return ranks


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"model.hf_assets_path: {error}") from None


@contextmanager
def _rust_errors(path: Path, problem: str) -> Iterator[None]:
    """Turn errors of a tokenizer's library into a `UserError`: bare Exceptions, and Rust's panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"model.hf_assets_path: {path} {problem}: {str(error)[:200]}") from None
