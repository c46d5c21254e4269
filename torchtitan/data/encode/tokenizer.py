"""Tokenizers: Hugging Face's `tokenizer.json` or Llama 3's tiktoken `.model`.

Text never becomes a special token; only `bos` and `eos` add those. A text of more than 200,000
characters is encoded in pieces, so that memory is bounded (`pieces`). Imports no torch.
"""

import base64
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import UserError
from torchtitan.utils.files import BOM
from torchtitan.utils.formats import read_json_object

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

# Before a space that follows no blank, and between a letter or digit and a newline or a punctuation
# mark: there the words of Llama 3, Qwen 2 and GPT-2 end in any text. Only characters that every
# version of Unicode has, and no marks that are usual within added tokens, as in <tool_call>.
_CUT = re.compile(
    r"(?<=\S)(?= )"
    r"|(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r"(?=[\n!\"(),.;=+?{}\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
PIECE = 100_000
"""Smallest number of characters of a piece; the largest is twice that."""
LONG = 4 * 2**20
"""Documents of more characters are returned piece by piece, so that a resume can begin inside."""

UNPREDICTED = 1 << 31
"""Flag of an id that the model reads but doesn't predict."""
CONTINUES = 1 << 30
"""Flag of an end-of-text that doesn't end its document, such as one that ends a turn."""
PLAIN = CONTINUES - 1
"""The bits of the id itself."""

_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")


def pieces(text: str, start: int = 0) -> Iterator[str]:
    """The pieces in which a long text is encoded, from a piece's first character on.

    A text of at most `2 * PIECE` characters is one piece. Of a longer one, each piece ends at the
    first `_CUT` after `PIECE` characters; a run of `2 * PIECE` without one is cut anyway. So most
    tokenizers give the ids of the whole text: all that split words as Llama 3, Qwen 2 or GPT-2 do.
    """
    while len(text) - start > 2 * PIECE:
        cut = _CUT.search(text, start + PIECE, start + 2 * PIECE)
        end = cut.start() if cut else start + 2 * PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def flagged(ids: NDArray[np.int64], flag: int, where: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Ids with a flag where `where` is true."""
    return np.where(where, ids | flag, ids)


class Tokenizer(ABC):
    """Text to token ids and back.

    A registered `model.tokenizer` implements `_ids` and `decode`, and sets `vocab_size`, `bos_id`,
    `eos_id` and, unless it calls `super().__init__(path)` with its file, `fingerprint`. Every
    process that needs it makes it again by the same call.
    """

    vocab_size: int
    """Largest id plus one."""
    bos_id: int | None
    eos_id: int
    path: Path | None = None
    """The tokenizer's file, if it has one."""
    fingerprint: str
    """Equal only for tokenizers that give the same ids; by default, a hash of the file."""
    _origin: tuple[str, Callable[[Path], "Tokenizer"]] | None = None
    """A registered tokenizer's `model.hf_assets_path` and constructor."""

    def __init__(self, path: Path):
        self.path = path
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of `text`, with the special tokens if asked. A long text is encoded in pieces.

        Raises:
            UserError: the tokenizer fails on this text.
        """
        ids: list[int] = []
        if bos and self.bos_id is not None:
            ids.append(self.bos_id)
        with rust_errors(self.name, "can't encode a text"):
            for piece in pieces(text):
                ids += self._ids(piece)
        if eos:
            ids.append(self.eos_id)
        return ids

    @property
    def name(self) -> str:
        """The tokenizer in messages."""
        return str(self.path or type(self).__name__)

    @abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Ids of `text`, which is at most one piece."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out."""

    def byte_lengths(self) -> NDArray[np.int32]:
        """UTF-8 bytes of text that each token stands for, `[vocab_size]`; 0 for special tokens.

        For byte-level tokenizers, the sum over the ids of a text is its exact length. Those that
        normalize text or prefix it with a space count the changed text.
        """
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, length in self._byte_lengths().items():
            lengths[token] = length
        return lengths

    def _byte_lengths(self) -> dict[int, int]:
        """Bytes of each token by its id; special tokens are missing."""
        return self._decoded_lengths(set(range(self.vocab_size)) - {self.bos_id, self.eos_id})

    def _decoded_lengths(self, tokens: Collection[int]) -> dict[int, int]:
        """Bytes that each token adds after a word: some decoders drop a text's first space."""
        words = (id for id in tokens if self.decode([id]).strip().isalpha())
        word = next(words, next(iter(tokens), 0))
        before = len(self.decode([word]).encode())
        return {id: len(self.decode([word, id]).encode()) - before for id in tokens}

    def encode_document(self, text: str) -> list[int]:
        """A document as training sees it: begin-of-text (if it exists), text, end-of-text."""
        return self.encode(text, bos=True, eos=True)

    def encode_in_pieces(
        self, text: str, start: int = 0
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """A document as training sees it: whole, or piece by piece if it has more than `LONG`
        characters; each with its first character.

        Args:
            start: first character of the first piece to encode, from an earlier call.
        """
        if len(text) <= LONG:
            yield 0, np.asarray(self.encode_document(text), np.int64)
            return
        for piece in pieces(text, start):
            ids = np.asarray(self.encode(piece, bos=start == 0), np.int64)
            if len(ids):
                yield start, ids
            start += len(piece)
        yield start, np.array([self.eos_id])

    def encode_batch(self, texts: Sequence[str], dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """The documents `texts` as training sees them, faster than one by one."""
        first = 0 if self.bos_id is None else 1
        documents = []
        with rust_errors(self.name, "can't encode a text"):
            for ids in self._batch_ids(texts):
                document = np.empty(first + len(ids) + 1, dtype)
                document[:first] = self.bos_id or 0
                document[first:-1] = ids
                document[-1] = self.eos_id
                documents.append(document)
        return documents

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Ids of each text."""
        return map(self._ids, texts)

    @property
    def files(self) -> list[Path]:
        """The files an export needs for others to use the tokenizer."""
        if self.path is None:
            return []
        names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
        beside = [self.path.with_name(name) for name in names]
        return [self.path, *filter(Path.is_file, beside)]

    def __reduce__(self) -> tuple[Callable[..., "Tokenizer"], tuple[Any, ...]]:
        # Worker processes read the file again.
        return build_tokenizer, self._origin or (str(self.path),)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, read by the `tokenizers` library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Backend

        with rust_errors(path, "is not a tokenizer"):
            self.backend = Backend.from_buffer(path.read_bytes().removeprefix(BOM))
        super().__init__(path)
        # The spelling of a special token in a text stays text.
        self.backend.encode_special_tokens = True
        # Some files have these settings for fine-tuning; they would truncate documents.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = (
            max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        config = path.with_name("tokenizer_config.json")
        self.bos_id = self._special(config, "bos_token", _BOS_NAMES)
        eos = self._special(config, "eos_token", _EOS_NAMES)
        if eos is None:
            raise UserError(
                f"model.hf_assets_path: {path} has no end-of-text token; name it as "
                "eos_token in tokenizer_config.json"
            )
        self.eos_id = eos

    def _special(self, config: Path, key: str, usual: Sequence[str]) -> int | None:
        name = _read_json(config).get(key)
        name = name.get("content") if isinstance(name, dict) else name
        if not isinstance(name, str | None):
            raise UserError(
                f"model.hf_assets_path: {config}: {key} is {type(name).__name__}, must be a string"
            )
        for candidate in (name,) if name else usual:
            if (id := self.backend.token_to_id(candidate)) is not None:
                return id
        return None

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        # "fast" leaves out the places of tokens in the text.
        encode = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)
        return (encoding.ids for encoding in encode(list(texts), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def _byte_lengths(self) -> dict[int, int]:
        added = self.backend.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special} | {self.bos_id, self.eos_id}
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        plain = {id: name for name, id in vocabulary.items() if id not in added}
        kinds = set()
        for component in (self.backend.decoder, self.backend.pre_tokenizer):
            description = json.loads(component.__getstate__()) if component is not None else {}
            for step in (
                description,
                *description.get("decoders", []),
                *description.get("pretokenizers", []),
            ):
                kinds.add(step.get("type"))
        if "ByteLevel" in kinds:
            # Each character of a token's name stands for a byte.
            lengths = {id: len(name) for id, name in plain.items()}
        else:
            lengths = self._decoded_lengths(plain)
            if "ByteFallback" in kinds:  # single bytes, which may not decode alone
                for id, name in plain.items():
                    if re.fullmatch("<0x[0-9A-F]{2}>", name):
                        lengths[id] = 1
        lengths |= {id: len(token.content.encode()) for id, token in added.items()}
        return {id: length for id, length in lengths.items() if id not in special}


class TiktokenTokenizer(Tokenizer):
    """Llama 3's `.model`: lines of a base64 token and its rank, read by `tiktoken`."""

    def __init__(self, path: Path):
        import tiktoken

        self.ranks = ranks = _read_ranks(path)
        super().__init__(path)
        reserved = iter(f"<|reserved_special_token_{i}|>" for i in range(256))
        names = [LLAMA3_SPECIAL.get(i) or next(reserved) for i in range(256)]
        special = {name: len(ranks) + i for i, name in enumerate(names)}
        self.backend = tiktoken.Encoding(
            path.stem, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = self.backend.n_vocab
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, disallowed_special=())

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        return (self.backend.encode_to_numpy(text, disallowed_special=()) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids))

    def _byte_lengths(self) -> dict[int, int]:
        return {id: len(token) for token, id in self.ranks.items()}


def build_tokenizer(
    hf_assets_path: str, make: Callable[[Path], Tokenizer] | None = None
) -> Tokenizer:
    """Open the tokenizer in a folder or its `original/`, or the file that the path names.

    Args:
        make: constructor of a registered tokenizer, called with the path.

    Raises:
        UserError: no such folder, no tokenizer in it, or a damaged one.
    """
    path = find_asset(hf_assets_path)
    if make is not None:
        tokenizer = make(path)
        if problem := _incomplete(tokenizer):
            raise UserError(f"model.tokenizer: {type(tokenizer).__name__} {problem}")
        tokenizer._origin = hf_assets_path, make
        return tokenizer
    if file := tokenizer_file(path):
        return HuggingFaceTokenizer(file) if file.suffix == ".json" else TiktokenTokenizer(file)
    reason = (
        "holds neither tokenizer.json nor a tiktoken .model file"
        if path.is_dir()
        else "does not exist"
    )
    raise UserError(
        f"model.hf_assets_path: {hf_assets_path} {reason}; scripts/download_hf_assets.py of the "
        "repository downloads a model's tokenizer; ./tests/assets/tokenizer ships with the package"
    )


def tokenizer_file(path: Path) -> Path | None:
    """The tokenizer's file in a folder or its `original/`, or the file at `path`; None if there
    is none.
    """
    candidates = [path]
    if path.is_dir():
        for folder in (path, path / "original"):
            candidates += [folder / "tokenizer.json", *folder.glob("*.model")]
    return next(filter(Path.is_file, candidates), None)


def _incomplete(tokenizer: object) -> str | None:
    """The first problem of a registered tokenizer; None if it has none."""
    if not isinstance(tokenizer, Tokenizer):
        return "must be a subclass of torchtitan.data.encode.tokenizer.Tokenizer"
    kinds: dict[str, Any] = {
        "vocab_size": int,
        "bos_id": int | None,
        "eos_id": int,
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


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and ranks of a tiktoken file. (tiktoken's reader would miss a changed file.)"""
    try:
        pairs = (line.split() for line in path.read_bytes().removeprefix(BOM).splitlines() if line)
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
def rust_errors(path: Path | str, problem: str) -> Iterator[None]:
    """Turn errors of a tokenizer's library into a `UserError`, including Rust panics, which don't
    derive from Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"model.hf_assets_path: {path} {problem}: {str(error)[:200]}") from None
