#!/usr/bin/env python3
"""How much there is to read in the package, room by room: `scripts/size.py [FOLDER]`.

A token is a name, number, operator or string that isn't a docstring. A code line holds at least one
token and isn't part of an import. Lines can be made fewer by making them denser; tokens can't.

Exits with 1 if a limit below is exceeded.
"""

import ast
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

MAX_DENSITY = 8.5
"""Tokens per code line of the whole package."""
MAX_CORE = 250_000
"""Tokens of the engine and the services, which training imports."""
MAX_ALL = 385_000
"""Tokens of the whole package."""

ENGINE = ("models", "parallel", "optim", "train")
SERVICES = ("config", "data", "checkpoint", "telemetry", "health", "inference", "utils")
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

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.files + other.files, self.code_lines + other.code_lines, self.tokens + other.tokens
        )

    @property
    def density(self) -> float:
        """Tokens per code line."""
        return self.tokens / max(self.code_lines, 1)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def size_of(file: Path) -> Size:
    imports: set[int] = set()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Expr) and is_text(node.value):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    tokens = 0
    lines: set[int] = set()
    with file.open() as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type not in NO_CODE and token.start[0] not in docstrings:
                tokens += 1
                lines.update(range(token.start[0], token.end[0] + 1))
    return Size(1, len(lines - imports), tokens)


def rooms_of(package: Path) -> dict[str, Size]:
    """The size of each room; the files beside the rooms are the room ""."""
    rooms: dict[str, Size] = {}
    for file in sorted(package.rglob("*.py")):
        folder = file.relative_to(package).parts[0]
        room = folder if folder != file.name else ""
        rooms[room] = rooms.get(room, Size()) + size_of(file)
    return rooms


def problems(core: Size, whole: Size) -> list[str]:
    found = []
    if whole.density > MAX_DENSITY:
        found.append(f"{whole.density:.2f} tokens per code line, above {MAX_DENSITY}")
    if core.tokens > MAX_CORE:
        found.append(f"{core.tokens:,} tokens in the core, above {MAX_CORE:,}")
    if whole.tokens > MAX_ALL:
        found.append(f"{whole.tokens:,} tokens in all, above {MAX_ALL:,}")
    return found


def main(argv: list[str]) -> int:
    package = Path(argv[0]) if argv else Path(__file__).parents[1] / "torchtitan"
    rooms = rooms_of(package)
    beside = sorted(rooms.keys() - {*ENGINE, *SERVICES})
    core = Size()
    whole = Size()
    print(f"{'':12}{'files':>6}{'lines':>8}{'tokens':>9}{'tokens/line':>13}")
    for room in (*ENGINE, *SERVICES, *beside):
        size = rooms.get(room, Size())
        whole += size
        if room not in beside:
            core += size
        show(room or "(no room)", size)
    show("core", core)
    show("all", whole)
    found = problems(core, whole)
    if found:
        print(f"error: the package is too large: {'; '.join(found)}", file=sys.stderr)
    return 1 if found else 0


def show(name: str, size: Size) -> None:
    print(f"{name:12}{size.files:6}{size.code_lines:8}{size.tokens:9}{size.density:13.2f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
