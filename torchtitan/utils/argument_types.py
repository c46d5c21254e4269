"""Parsers of commands, and types of their arguments, for `argparse`."""

import argparse
import re
from pathlib import Path
from typing import Any

from torchtitan.utils.errors import EMPTY
from torchtitan.utils.storage import expand_path
from torchtitan.utils.wording import cut


class _Parser(argparse.ArgumentParser):
    """Arguments without a type are text that isn't empty, paths are as in the configuration."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.register("type", None, _text)
        self.register("type", Path, lambda text: Path(path_or_url(text)))


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(EMPTY)
    return text


def path_or_url(text: str) -> str:
    """Argument type of a path or URL, with `~` and variables as in the configuration."""
    try:
        return expand_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def command_parser(
    name: str, description: str | None, *, usage: str | None = None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """The parser of `torchtitan NAME`, which prints the lines of the description unchanged."""
    return _Parser(
        prog=f"torchtitan {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=usage,
        epilog=epilog,
    )


def count(text: str, *, fewest: int = 1, most: int = 10**9) -> int:
    """Argument type of a whole number in a range."""
    if not re.fullmatch("[0-9]{1,10}", text) or not fewest <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"{cut(text, 40)}: must be {fewest} or more, and at most {most:,}"
        )
    return int(text)


def number(text: str, *, most: float = 10**18, zero: bool = False) -> float:
    """Argument type of a number above 0 and at most `most`.

    Args:
        zero: accept 0 too.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most and not (zero and value == 0):
        low = "of 0 or more" if zero else "above 0"
        raise argparse.ArgumentTypeError(
            f"{cut(text, 40)}: must be a number {low}, at most {most:g}"
        )
    return value


def share(text: str) -> float:
    """Argument type of a percentage, such as `0.5%`: a fraction between 0 and 1."""
    number = text.removesuffix("%")
    if number == text or not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?", number):
        raise argparse.ArgumentTypeError(f"{cut(text, 40)}: must be a percentage, such as 0.5%")
    if not 0 < float(number) < 100:
        raise argparse.ArgumentTypeError(f"{cut(text, 40)}: must be between 0% and 100%")
    return float(number) / 100


def size(text: str) -> int:
    """Argument type of a number of bytes, in the form of `wording.show_size`: `500 MB`, `2GB`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?(kB|KB|MB|GB|TB)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{cut(text, 40)}: must be a size in kB, MB, GB or TB, such as 500MB"
        )
    return round(float(match[1]) * 1000 ** (1 + "KMGT".index(match[2][0].upper())))
