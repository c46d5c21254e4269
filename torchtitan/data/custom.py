"""Data sources that a module of the user registers.

`make(dataset_path[, keys])` returns one of

- numbered documents: `len(it)`, `it[i]`, the text of document i, and `fingerprint`, a string that
changes when the
  texts do. Document i must be the same on every rank and at every call; which one is read when
  follows from the seed.
- a `datasets.IterableDataset` with a column of texts, for example by
`IterableDataset.from_generator(texts,
  gen_kwargs={"shards": [...]})`, whose shards ranks divide among them. Its `state_dict()` is its
  position, and JSON.

Both take part in the global order of rows, in mixtures and in resumes as built-in sources do. Every
rank and every worker process calls `make`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torchtitan.data.text.contents import Contents
from torchtitan.utils.errors import UserError

_LOOKED_AT = 1000
"""Documents in which to look for text. Reading all may take long."""


class RegisteredDocuments:
    """Documents of a registered source, checked."""

    text_bytes: None = None

    def __init__(self, made: Any, key: str):
        """
        Args:
            key: the start of messages.

        Raises:
            UserError: it lacks a method, or has no text.
        """
        self.made = made
        self.key = key
        self.skipped: Counter[str] = Counter()
        lacks = [
            name for name in ("__len__", "__getitem__", "fingerprint") if not hasattr(made, name)
        ]
        if lacks:
            raise UserError(
                f"{key} made a {type(made).__name__} without {', '.join(lacks)}; "
                "documents need these, unless they are "
                "a datasets.IterableDataset"
            )
        if not isinstance(made.fingerprint, str):
            raise UserError(
                f"{key} has a fingerprint of type {type(made.fingerprint).__name__}; it "
                "must be a string"
            )
        self.contents = Contents(made.fingerprint)
        count = min(len(self), _LOOKED_AT)
        if not any(self[i] for i in range(count)):  # seldom reads more than one
            raise UserError(
                f"{key} holds no text in its first {count} documents"
                if count
                else f"{key} is empty"
            )

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> str:
        text = self.made[index]
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
) -> Any:
    """Open a registered source: `RegisteredDocuments`, or a stream.

    Raises:
        UserError: it is neither of the two kinds, or has no text.
    """
    made = make(dataset_path)
    return made if is_stream(made) else RegisteredDocuments(made, f'{section}.dataset: "{dataset}"')


def is_stream(made: Any) -> bool:
    """Whether it is a `datasets.IterableDataset`, whose import would take seconds."""
    return hasattr(made, "num_shards")
