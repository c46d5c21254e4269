"""Every tokenizer: text to ids and back, marks around documents, pieces of long texts.

Text never becomes a special token; only `bos` and `eos` add those. A text of more than 200,000
characters is encoded in pieces, so that memory is bounded (`pieces`). Imports no torch.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.special_tokens import Ends
from torchtitan.utils.errors import UserError

# Before a space that follows no blank, and between a letter or digit and a newline or a punctuation
# mark: words end there in most tokenizers. Only characters that every version of Unicode has.
_CUT = re.compile(
    r"(?<=\S)(?= )"
    r"|(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r"(?=[\n!\"(),.;=+?{}\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
_NEAR = 256
"""Characters on either side of a cut that are encoded to see whether it changes ids."""
_TRIES = 1000
"""Maximum number of cuts to try for the end of a piece."""
PIECE = 100_000
"""Minimum number of characters of a piece; the maximum is twice as large."""
LONG = 4 * 2**20
"""Documents of more characters are returned piece by piece, so that a resume can begin inside."""

UNPREDICTED = 1 << 31
"""Flag of an id that the model reads but doesn't predict."""
CONTINUES = 1 << 30
"""Flag of an end-of-text that doesn't end its document, such as one that ends a turn."""
PLAIN = CONTINUES - 1
"""The bits of the id itself."""

SplitsCleanly = Callable[[str, str], bool]
"""True if tokenizing two neighboring texts separately gives the ids of their concatenation."""


def pieces(
    text: str, start: int = 0, splits_cleanly: SplitsCleanly = lambda head, tail: True
) -> Iterator[str]:
    """The pieces in which a long text is encoded, from a piece's first character on.

    A text of at most `2 * PIECE` characters is one piece. Pieces of a longer text end at the
    first `_CUT` after `PIECE` characters at which the text around it splits cleanly; a run of
    `2 * PIECE` characters without one is cut anyway.
    """
    while len(text) - start > 2 * PIECE:
        end = _end_of_piece(text, start, splits_cleanly)
        yield text[start:end]
        start = end
    yield text[start:]


def _end_of_piece(text: str, start: int, splits_cleanly: SplitsCleanly) -> int:
    cuts = _CUT.finditer(text, start + PIECE, start + 2 * PIECE)
    for cut in islice(cuts, _TRIES):
        at = cut.start()
        if splits_cleanly(text[max(start, at - _NEAR) : at], text[at : at + _NEAR]):
            return at
    return start + 2 * PIECE


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
    """The token that begins documents and prompts; None if they begin with their text."""
    eos_id: int | None
    """The token that ends documents; None: they follow each other without one."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a generated text, in addition to `eos_id`, such as the end of a turn."""
    notes: tuple[str, ...] = ()
    """Remarks about the tokenizer's files, for the log of a start."""
    path: Path | None = None
    """The tokenizer's file, if it has one."""
    chat_template: Path | None = None
    """The file of the chat template; None: the one beside the tokenizer's file."""
    fingerprint: str
    """Equal only for tokenizers that give the same ids; by default, a hash of the file."""
    origin: "Origin"

    def __init__(self, path: Path):
        self.path = path
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()

    def set_ends(self, ends: Ends) -> None:
        """Begin and end documents with these tokens."""
        self.bos_id, self.eos_id, self.stop_ids = ends.bos, ends.eos, ends.stop
        self.fingerprint += ends.fingerprint

    @cached_property
    def drops_space(self) -> bool:
        """Whether the tokenizer puts a space before each text, which pieces must not repeat."""
        try:
            separate_ids = [*self._ids("a"), *self._ids("b")]
            return [*self._ids("a b")] == separate_ids != [*self._ids("a"), *self._ids(" b")]
        except Exception:  # a vocabulary of words or characters that lacks these
            return False

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of `text`, with the special tokens if asked. A long text is encoded in pieces.

        Raises:
            UserError: the tokenizer fails on this text.
        """
        ids: list[int] = []
        if bos and self.bos_id is not None:
            ids.append(self.bos_id)
        with rust_errors(self.name, "can't encode a text"):
            for index, piece in enumerate(pieces(text, 0, self._splits_cleanly)):
                ids += self._ids(self._inner(piece) if index else piece)
        if eos:
            ids += self.ends
        return ids

    @property
    def ends(self) -> list[int]:
        """The ids after a document's text: `eos_id`, if there is one."""
        return [] if self.eos_id is None else [self.eos_id]

    @property
    def all_ends(self) -> list[int]:
        """Every token that ends a generated text, `eos_id` first."""
        return list(dict.fromkeys([*self.ends, *self.stop_ids]))

    def end_for(self, key: str) -> int:
        """`eos_id`, which `key` requires.

        Raises:
            UserError: the tokenizer has none.
        """
        if self.eos_id is None:
            raise UserError(
                f"{key} needs a token that ends documents, which {self.name} doesn't have; set "
                "model.end_of_document to one of its tokens, or choose another tokenizer"
            )
        return self.eos_id

    def _splits_cleanly(self, head: str, tail: str) -> bool:
        if self.drops_space and not tail.startswith(" "):
            return False
        both = [*self._ids(head), *self._ids(self._inner(tail))]
        return both == list(self._ids(head + tail))

    def _inner(self, piece: str) -> str:
        """The text to encode for a piece after a text's first."""
        return piece[1:] if self.drops_space and piece.startswith(" ") else piece

    @property
    def name(self) -> str:
        """The tokenizer in messages."""
        return str(self.path or type(self).__name__)

    @property
    def text_size(self) -> int:
        """Largest id that a document can have, plus one: the minimum size of a vocabulary."""
        return self.vocab_size

    def describe(self) -> str:
        """The beginning and end of documents in words, for the log."""
        end = "end with their text"
        if self.eos_id is not None:
            end = f"end with {self.decode([self.eos_id])} ({self.eos_id})"
        if self.bos_id is None:
            return f"Documents {end}, and have no token at the beginning"
        return f"Documents begin with {self.decode([self.bos_id])} ({self.bos_id}) and {end}"

    @abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Ids of `text`, which is at most two pieces long."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out."""

    def byte_lengths(self) -> NDArray[np.int32]:
        """UTF-8 bytes of text that each token stands for, `[vocab_size]`; 0 for special tokens.

        For byte-level tokenizers, the sum over the ids of a text is its exact length. Tokenizers
        that normalize text or prefix it with a space count the changed text.
        """
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, length in self._byte_lengths().items():
            lengths[token] = length
        return lengths

    def _byte_lengths(self) -> dict[int, int]:
        """Bytes of each token by its id, without special tokens."""
        return self._decoded_lengths(set(range(self.vocab_size)) - {self.bos_id, self.eos_id})

    def _decoded_lengths(self, tokens: Collection[int]) -> dict[int, int]:
        """Bytes that each token adds after a word: some decoders drop a text's first space."""
        words = (id for id in tokens if self.decode([id]).strip().isalpha())
        word = next(words, next(iter(tokens), 0))
        before = len(self.decode([word]).encode())
        return {id: len(self.decode([word, id]).encode()) - before for id in tokens}

    def encode_document(self, text: str) -> list[int]:
        """A document as training sees it: begin-of-text, text and end-of-text, as far as the
        tokenizer has them.
        """
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
        for piece in pieces(text, start, self._splits_cleanly):
            with rust_errors(self.name, "can't encode a text"):
                ids = self._ids(self._inner(piece) if start else piece)
            if start == 0 and self.bos_id is not None:
                ids = [self.bos_id, *ids]
            if len(ids):
                yield start, np.asarray(ids, np.int64)
            start += len(piece)
        yield start, np.array(self.ends, np.int64)

    def encode_batch(self, texts: Sequence[str], dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """The documents `texts` as training sees them, faster than one by one."""
        first = 0 if self.bos_id is None else 1
        documents = []
        with rust_errors(self.name, "can't encode a text"):
            for ids in self._batch_ids(texts):
                after = first + len(ids)
                document = np.empty(after + len(self.ends), dtype)
                document[:first] = self.bos_id or 0
                document[first:after] = ids
                document[after:] = self.ends
                documents.append(document)
        return documents

    def _batch_ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Ids of each text."""
        return map(self._ids, texts)

    @property
    def files(self) -> list[Path]:
        """The files that an export needs for using the tokenizer elsewhere."""
        if self.path is None:
            return []
        names = ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
        names += ["chat_template.jinja", "chat_template.json"]
        beside = [self.path.with_name(name) for name in names]
        return [self.path, *filter(Path.is_file, beside)]

    def __reduce__(self) -> "Origin":
        # Worker processes read the file again.
        return self.origin


Origin = tuple[Callable[..., Tokenizer], tuple[Any, ...]]
"""The call of `build_tokenizer` that opened a tokenizer, which opens it again elsewhere."""


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
