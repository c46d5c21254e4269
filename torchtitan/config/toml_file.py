"""TOML files: their settings with line numbers, and the files that they extend."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from torchtitan.config.compat import RENAMED_SECTIONS, UNSUPPORTED, rename_old_keys
from torchtitan.config.keys import FIELDS, Setting, prefixes
from torchtitan.utils.assets import find_config

_TABLES = {table for key in (*FIELDS, *UNSUPPORTED) for table in prefixes(key)[1:]} | RENAMED_SECTIONS.keys()


def read_toml(
    path: Path, named_at: str, problems: list[str], warnings: list[str], seen: tuple[Path, ...] = ()
) -> dict[str, Setting]:
    """The settings of a TOML file on top of those of the files it extends.

    Args:
        named_at: where `path` was given, for the message if it can't be read.
        problems: receives what is wrong.
        warnings: receives a line for each old spelling.
        seen: the files that extend this one.
    """
    if path.resolve() in seen:
        problems.append(f"{path}: extends itself: {' -> '.join(p.name for p in (*seen, path))}")
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomli.loads(text)
    except OSError as error:
        problems.append(f"{named_at}: can't read {path}: {error.strerror or error}")
        return {}
    except UnicodeDecodeError as error:
        problems.append(f"{named_at}: can't read {path}: not UTF-8 text (byte {error.start}: {error.reason})")
        return {}
    except tomli.TOMLDecodeError as error:
        problems.append(f"{path}: not valid TOML: {error}")
        return {}
    bases = tables.pop("extends", [])
    lines = line_numbers(text)

    def place(key: str) -> str:
        # All keys of an inline table share its line.
        line = next((lines[k] for k in prefixes(key) if k in lines), None)
        return f"{path}:{line}" if line else str(path)

    bases = [bases] if isinstance(bases, str) else bases
    at = f"{place('extends')}: extends"
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        problems.append(f"{at}: got {bases!r}, must be the name of a TOML file or a list of names")
        bases = []
    given: dict[str, Setting] = {}
    for base in bases:
        found = find_config(base, path.parent)
        given |= read_toml(found, at, problems, warnings, (*seen, path.resolve()))
    own = {key: Setting(value, place(key)) for key, value in _flatten(tables)}
    return given | rename_old_keys(own, problems, warnings)


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and (value or prefix + key in _TABLES):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_HEADER = re.compile(r"[ \t]*\[{1,2}[ \t]*([^\[\]\n]+?)[ \t]*\]")
_KEY = re.compile(r"""[ \t]*((?:[\w-]+|"[^"\n]*"|'[^'\n]*')(?:[ \t]*\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*'))*)[ \t]*=""")
# Strings (multi-line ones first) and comments, which can hide a line end or a bracket; brackets; line ends.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]''', re.DOTALL
)


def line_numbers(text: str) -> dict[str, int]:
    """Line of each key and table header of a valid TOML text (tomli keeps no positions)."""
    numbers: dict[str, int] = {}
    table = ""
    for start in _statements(text):
        number = text.count("\n", 0, start) + 1
        if header := _HEADER.match(text, start):
            table = _unquoted(header[1]) + "."
            numbers.setdefault(table[:-1], number)
        elif key := _KEY.match(text, start):
            numbers.setdefault(table + _unquoted(key[1]), number)
    return numbers


def _statements(text: str) -> Iterator[int]:
    """Offsets of the lines that don't continue a string, list or inline table from an earlier line."""
    depth = 0
    yield 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if token[0] == "\n" and depth == 0:
            yield token.end()


def _unquoted(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
