#!/usr/bin/env python3
"""How much there is to read in the package, room by room: `scripts/size.py [--vague] [FOLDER]`.

A token is a name, number, operator or string that isn't a docstring. A code line holds at least one
token and isn't part of an import. Lines can be made fewer by making them denser; tokens can't.

Fails if a room differs from its row of `ROOMS`, or their sum from `SUM`, which only falls: a commit
that raises a row lowers others by as much.
"""

import argparse
import ast
import keyword
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ENGINE = ("models", "parallel", "optim", "train")
SERVICES = ("config", "data", "checkpoint", "telemetry", "health", "inference", "utils")
BESIDE = ("testing", "tools", "commands")
ROOMS = {
    "models": 45_100,
    "parallel": 29_600,
    "optim": 9_500,
    "train": 23_300,
    "config": 27_300,
    "data": 51_300,
    "checkpoint": 33_600,
    "telemetry": 9_400,
    "health": 10_200,
    "inference": 8_200,
    "utils": 16_100,
    "testing": 9_500,
    "tools": 58_200,
    "commands": 15_800,
}
"""Tokens of each room, rounded to the nearest `STEP`."""
STEP = 100
SUM = 347_100
"""The sum of `ROOMS`. It only falls."""

VAGUE = {"about", "one", "own", "part", "parts", "place", "places", "rest"}
"""Words that fit everything, and so name nothing: `own_rows` are `local_rows`."""
PARTICIPLES = {
    *("asked", "chosen", "counted", "covered", "done", "found", "given", "gone", "held", "kept"),
    *("known", "left", "listed", "lost", "made", "measured", "missing", "moved", "named"),
    *("needed", "opened", "planned", "said", "sent", "shown", "stated", "taken", "told", "used"),
    *("wanted", "written"),
}
"""Participles that stand for a noun: `found` may be `gradients` or `problems`. Others are as bad;
these are counted.
"""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass
class Size:
    """The size of a file or of several."""

    files: int = 0
    code_lines: int = 0
    tokens: int = 0
    names: int = 0
    words: Counter[str] = field(default_factory=Counter)
    """How often each word of `VAGUE` and `PARTICIPLES` is a name or a word of one."""

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.files + other.files,
            self.code_lines + other.code_lines,
            self.tokens + other.tokens,
            self.names + other.names,
            self.words + other.words,
        )


def size_of(file: Path) -> Size:
    imports: set[int] = set()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Expr) and _is_text(node.value):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    size = Size(files=1)
    lines: set[int] = set()
    with file.open() as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type in NO_CODE or token.start[0] in docstrings:
                continue
            size.tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                size.names += 1
                words = set(token.string.lower().split("_"))
                size.words.update(words & (VAGUE | PARTICIPLES))
    size.code_lines = len(lines - imports)
    return size


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def sizes(package: Path) -> dict[str, Size]:
    """The size of each room; the files beside the rooms are the room ""."""
    rooms: dict[str, Size] = {}
    for file in sorted(package.rglob("*.py")):
        folder = file.relative_to(package).parts[0]
        room = folder if folder != file.name else ""
        rooms[room] = rooms.get(room, Size()) + size_of(file)
    return rooms


def problems(rooms: dict[str, Size]) -> list[str]:
    """Where the rooms differ from the table."""
    messages = [f"{room}: not in ROOMS" for room in sorted(rooms.keys() - {"", *ROOMS})]
    for room, row in ROOMS.items():
        tokens = round(rooms.get(room, Size()).tokens / STEP) * STEP
        if tokens > row:
            messages.append(
                f"{room}: {tokens:,} tokens, {row:,} in ROOMS; simplify, or raise the row "
                "and lower others by as much"
            )
        elif tokens < row:
            messages.append(f"{room}: {tokens:,} tokens, {row:,} in ROOMS; lower the row")
    if (total := sum(ROOMS.values())) != SUM:
        remedy = "lower it" if total < SUM else "it only falls: lower other rows"
        messages.append(f"the rows add up to {total:,}, and SUM is {SUM:,}; {remedy}")
    return messages


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="How much there is to read, room by room.")
    parser.add_argument("package", nargs="?", default=Path(__file__).parents[1] / "torchtitan")
    parser.add_argument(
        "--vague", action="store_true", help="count words that name nothing, per 100,000 names"
    )
    args = parser.parse_args(argv)
    rooms = sizes(Path(args.package))
    show = _show_vague if args.vague else _show_size
    show()
    for room in (*ENGINE, *SERVICES, *BESIDE):
        show(room, rooms.get(room, Size()))
    core = sum((rooms.get(room, Size()) for room in (*ENGINE, *SERVICES)), Size())
    show("core", core)
    show("all", sum(rooms.values(), Size()))
    messages = problems(rooms)
    for message in messages:
        print(f"error: {message}", file=sys.stderr)
    return 1 if messages else 0


def _show_size(name: str = "", size: Size | None = None) -> None:
    if size is None:
        print(f"{'':12}{'files':>6}{'lines':>8}{'tokens':>9}{'tokens/line':>13}")
        return
    density = size.tokens / max(size.code_lines, 1)
    print(f"{name:12}{size.files:6}{size.code_lines:8}{size.tokens:9}{density:13.2f}")


def _show_vague(name: str = "", size: Size | None = None) -> None:
    if size is None:
        print(f"{'':12}{'vague':>7}{'participles':>13}  most frequent")
        return
    scale = 100_000 / max(size.names, 1)
    vague, participles = (
        sum(size.words[word] for word in words) * scale for words in (VAGUE, PARTICIPLES)
    )
    frequent = ", ".join(f"{word} {count * scale:.0f}" for word, count in size.words.most_common(5))
    print(f"{name:12}{vague:7.0f}{participles:13.0f}  {frequent}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
