"""Words, tables and argument types of the command line."""

import argparse
import io
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?%?")


def plural(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `10,000 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A borderless table, the same on a terminal and in a file: cells are never cut, numbers are right-aligned.

    Args:
        rows: the first holds the headings.
    """
    from rich.console import Console  # imported late: takes longer than reading a configuration
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for cells in zip(*(rows[1:] or rows), strict=True):
        numeric = all(_NUMBER.fullmatch(cell) for cell in cells)
        table.add_column(no_wrap=True, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=10_000, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def count(text: str) -> int:
    """Argument type of a positive integer, for `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return int(text)
