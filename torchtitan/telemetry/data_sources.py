"""What a record says of each data source."""

from collections.abc import Sequence
from typing import Any


def describe_sources(
    names: Sequence[str], sums: Sequence[Sequence[float]], tokens: Sequence[int]
) -> dict[str, float | None]:
    """Entries `loss/<name>`, `tokens/<name>`, `epochs/<name>` and `bytes_per_token/<name>`.

    Args:
        sums: from `SourceTally.take`. A source without rows since the last record has no loss.
        tokens: read from each source by the whole run.
    """
    record: dict[str, Any] = {}
    for name, (loss, count, size, epochs), total in zip(names, sums, tokens, strict=True):
        record |= {
            f"loss/{name}": loss / count if count else None,
            f"tokens/{name}": total,
            f"epochs/{name}": epochs,
            f"bytes_per_token/{name}": size / count if count else None,
        }
    return record
