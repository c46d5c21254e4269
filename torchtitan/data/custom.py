"""Data sources that a module of the user registers.

`make(dataset_path[, keys])` returns one of

- `torchtitan.data.documents.Documents`: `len(it)`, `it[i]`, the text of document i, and `fingerprint`, a string that
  changes when the texts do; `text_bytes` and `skipped` may be missing. Document i must be the same on every rank and at
  every call; which one is read when follows from the seed.
- a `datasets.IterableDataset` with a column `text`, for example by `IterableDataset.from_generator(texts,
  gen_kwargs={"shards": [...]})`, whose shards ranks divide among them. It keeps its own position.

Both take part in the global order of rows, in mixtures and in resumes as built-in sources do. Every rank and every
worker process calls `make`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torchtitan.data.documents import check_has_text
from torchtitan.utils.errors import UserError


def open_custom(make: Callable[..., Any], dataset: str, dataset_path: str | None, section: str) -> Any:
    """Open a registered source.

    Raises:
        UserError: it is neither of the two kinds, or has no text.
    """
    made, key = make(dataset_path), f'{section}.dataset: "{dataset}"'
    if is_stream(made):
        return made
    lacks = [name for name in ("__len__", "__getitem__", "fingerprint") if not hasattr(made, name)]
    if lacks:
        raise UserError(
            f"{key} made a {type(made).__name__} without {', '.join(lacks)}; it must have the methods of "
            "torchtitan.data.documents.Documents, or be a datasets.IterableDataset"
        )
    if not isinstance(made.fingerprint, str):
        raise UserError(f"{key} has a fingerprint of type {type(made.fingerprint).__name__}; it must be a string")
    made.skipped = getattr(made, "skipped", Counter())
    made.text_bytes = getattr(made, "text_bytes", None)
    check_has_text(made, f"{section}.dataset", dataset)
    if made.text_bytes is None and not any(made[i] for i in range(len(made))):  # seldom reads more than one
        raise UserError(f"{key} holds no text: all its documents are empty ({len(made):,} of them)")
    return made


def is_stream(made: Any) -> bool:
    return hasattr(made, "num_shards")
