"""Data sources of the user.

A module of the user registers them with `make(dataset_path[, keys])`, which returns either

- numbered documents: `len(it)`, `it[i]`, the text of document i, and `fingerprint`, a string that
  changes when the texts do. Document i must be the same on every rank and at every call; the seed
  decides the order.
- a `datasets.IterableDataset` with a column of texts, for example by
  `IterableDataset.from_generator(texts, gen_kwargs={"shards": [...]})`, whose shards ranks divide
  among them. Its `state_dict()` is its position, and must be JSON.

Both take part in the global order of rows, in mixtures and in resumes as built-in sources do. Every
rank and every worker process calls `make`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torchtitan.data.encode.chat import Chat
from torchtitan.data.read.contents import Contents
from torchtitan.data.read.opening import BadDocument
from torchtitan.data.read.streams import Stream
from torchtitan.utils.errors import UserError

_CHECKED_DOCUMENTS = 1000
"""Registered documents in which to look for text. Reading all may be slow."""


class RegisteredDocuments:
    """Documents of a registered source, checked."""

    text_bytes: None = None

    def __init__(self, documents: Any, key: str, chat: Chat | None = None):
        """
        Args:
            key: the start of messages.
            chat: the documents are conversations: lists of messages.

        Raises:
            UserError: it lacks a method, or has no text.
        """
        self.documents = documents
        self.key = key
        self.chat = chat
        self.skip_counts: Counter[str] = Counter()
        methods = ("__len__", "__getitem__", "fingerprint")
        if absent := [name for name in methods if not hasattr(documents, name)]:
            raise UserError(
                f"{key} made a {type(documents).__name__} without {', '.join(absent)}; documents "
                "need these, unless they are a datasets.IterableDataset"
            )
        if not isinstance(documents.fingerprint, str):
            kind = type(documents.fingerprint).__name__
            raise UserError(f"{key} has a fingerprint of type {kind}; it must be a string")
        reading = f"; chat template {chat.fingerprint}" if chat else ""
        self.contents = Contents(f"{documents.fingerprint}{reading}")
        if not len(self):
            raise UserError(f"{key} is empty")
        count = min(len(self), _CHECKED_DOCUMENTS)
        if not any(self[i] for i in range(count)):  # seldom reads more than one
            raise UserError(f"{key} holds no text in its first {count} documents")

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> str:
        text = self.documents[index]
        if self.chat is not None:
            try:
                return self.chat.document(text)
            except BadDocument as error:
                raise UserError(f"{self.key}: document {index}: {error}") from None
        if not isinstance(text, str):
            raise UserError(
                f"{self.key} has a {type(text).__name__} as document {index}; it must be a string"
            )
        return text


def open_custom(
    make: Callable[..., Any],
    dataset: str,
    dataset_path: str | None,
    section: str,
    chat: Chat | None = None,
) -> "RegisteredDocuments | Stream":
    """Open a registered source.

    Raises:
        UserError: it is neither of the two kinds, or has no text.
    """
    source = make(dataset_path)
    if hasattr(source, "num_shards"):  # a stream; importing its class would take seconds
        stream: Stream = source
        return stream
    return RegisteredDocuments(source, f'{section}.dataset: "{dataset}"', chat)
