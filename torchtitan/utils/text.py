"""Words, tables and argument types of the command line."""

import argparse
import io
import re
import reprlib
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?%?")
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 100
_BRIEF.maxlong, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxlevel = 30, 8, 4, 3


def brief(value: object) -> str:
    """`repr(value)` for a message: long text, numbers and containers are cut."""
    return cut(_BRIEF.repr(value), 300)


def cut(text: str, limit: int) -> str:
    """`text`, without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    end = limit // 4
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def listed(values: Iterable[object], limit: int = 16) -> str:
    """The values separated by commas; of many, the first ones and the last."""
    words = [str(value) for value in values]
    return ", ".join(words if len(words) <= limit else [*words[: limit - 2], "...", words[-1]])


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


def count(text: str, *, fewest: int = 1, most: int = 10**9) -> int:
    """Argument type of a number of things, for `argparse`."""
    if not re.fullmatch("[0-9]{1,10}", text) or not fewest <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{cut(text, 40)}: must be {fewest} or more, and at most {most:,}")
    return int(text)
