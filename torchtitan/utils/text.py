"""Words and numbers on a terminal."""

import argparse
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def count(text: str) -> int:
    """The type of an argument that is a number of things, for `argparse`."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value
