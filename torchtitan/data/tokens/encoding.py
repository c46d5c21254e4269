"""Encodes documents, in the worker processes of `torchtitan tokenize`. Imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import PIECE, Origin, Tokenizer
from torchtitan.data.read.corpus import RawDocument, bad_document, hash_text
from torchtitan.data.read.opening import BadDocument
from torchtitan.data.read.records import decode
from torchtitan.data.tokens.token_files import token_dtype


class Encoded(NamedTuple):
    """The sound documents of a batch."""

    ids: NDArray[Any]
    """Token ids, document after document."""
    lengths: NDArray[np.int64]
    """Number of ids of each document."""
    hashes: NDArray[np.uint64]
    """Hash of each document's text."""
    sizes: NDArray[np.int64]
    """Bytes of each document's text."""
    bad: list[tuple[str, str]]
    """Kind and problem of each bad document."""

    @property
    def documents(self) -> list[NDArray[Any]]:
        """The ids of each document."""
        ends = self.lengths.cumsum().tolist()
        return [self.ids[start:end] for start, end in pairwise([0, *ends])]

    def only(self, mask: NDArray[np.bool_]) -> "Encoded":
        """The documents at which `mask` is true."""
        return Encoded(
            self.ids[np.repeat(mask, self.lengths)],
            self.lengths[mask],
            self.hashes[mask],
            self.sizes[mask],
            bad=[],
        )


@dataclass(frozen=True)
class Encoder:
    """Encodes batches; sent to the worker processes."""

    tokenizer: Origin
    column: str
    stop: bool
    """Whether a bad document is an error."""
    messages: bool = False
    """Whether the documents are conversations."""

    def __call__(self, batch: Sequence[RawDocument]) -> Encoded:
        """
        Raises:
            UserError: a document is bad and `stop` is set.
        """
        tokenizer = tokenizer_of(self.tokenizer)
        dtype = token_dtype(tokenizer, self.messages)
        chat = _chat(self.tokenizer) if self.messages else None
        ids: list[NDArray[Any]] = []
        hashes: list[int] = []
        sizes: list[int] = []
        bad: list[tuple[str, str]] = []

        def note(text: str, template_size: int | None = None) -> None:
            hash, size = hash_text(text)
            hashes.append(hash)
            sizes.append(size if template_size is None else template_size)

        batch_texts: list[str] = []
        for item in batch:
            try:
                text = decode(item.content, self.column, chat)
                if chat is not None:
                    ids.append(chat.encode(text).astype(dtype))
                    rendered = chat.rendered(text)
                    note(rendered.text, chat.size(rendered))
                    continue
                if len(text) <= 2 * PIECE:
                    batch_texts.append(text)
                    note(text)
                    continue
                ids += tokenizer.encode_batch(batch_texts, dtype)
                batch_texts = []
                pieces = [piece.astype(dtype) for _, piece in tokenizer.encode_in_pieces(text)]
                note(text)
                ids.append(np.concatenate(pieces))
            except BadDocument as error:
                problem = f"{item.location}: {error}"
                if self.stop:
                    raise bad_document("--input", problem) from None
                bad.append((error.kind, problem))
        ids += tokenizer.encode_batch(batch_texts, dtype)
        all_ids = np.concatenate(ids) if ids else np.empty(0, dtype)
        lengths = np.array([len(document) for document in ids], np.int64)
        return Encoded(
            all_ids, lengths, np.array(hashes, np.uint64), np.array(sizes, np.int64), bad=bad
        )


def open_again(origin: Origin) -> Tokenizer:
    """`tokenizer_of`, read again: another may have been trained there since an earlier call."""
    tokenizer_of.cache_clear()
    _chat.cache_clear()
    return tokenizer_of(origin)


@cache
def tokenizer_of(origin: Origin) -> Tokenizer:
    """The tokenizer of this process, which uses one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    build, arguments = origin
    return build(*arguments)


@cache
def _chat(origin: Origin) -> Chat:
    """The chat template of that tokenizer."""
    return Chat(tokenizer_of(origin), "--messages-column")
