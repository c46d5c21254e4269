"""TOML files: their settings with line numbers, and the files that they extend."""

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import tomli

from torchtitan.config.load.compat import RENAMED_SECTIONS, UNSUPPORTED, rename_old_keys
from torchtitan.config.load.keys import FIELDS, Setting, prefixes
from torchtitan.config.types import path_problem
from torchtitan.utils.assets import find_config, shipped_configs
from torchtitan.utils.errors import did_you_mean
from torchtitan.utils.files import read_regular, text_of
from torchtitan.utils.limits import KEY_LENGTH, NEAR_FILES, TOML_BYTES, TOML_DEPTH, TOML_VALUES
from torchtitan.utils.wording import brief

HERE = "{here}"
"""At the start of a string, the folder of the TOML file: `"{here}/tokens"` names a neighbor of the
file, wherever a command starts. Other paths are relative to the command's working directory.
"""
_TABLES = {
    table for key in (*FIELDS, *UNSUPPORTED) for table in prefixes(key)[1:]
} | RENAMED_SECTIONS.keys()


def read_toml(
    name: str, origin: str, problems: list[str], warnings: list[str]
) -> dict[str, Setting]:
    """The settings of a TOML file, merged over the files it extends.

    Args:
        name: a path, or the name of a shipped configuration.
        origin: where `name` was given, for the message if it can't be read.
        problems: receives the mistakes.
        warnings: receives a line for each old spelling.
    """
    return _Files(problems, warnings).settings(name, Path(), origin)


class _Files:
    """The files of one configuration, each read once."""

    def __init__(self, problems: list[str], warnings: list[str]):
        self.problems = problems
        self.warnings = warnings
        self._by_file: dict[str, dict[str, Setting]] = {}
        self._remaining_bytes = TOML_BYTES

    def settings(
        self, name: str, folder: Path, origin: str, above: tuple[str, ...] = ()
    ) -> dict[str, Setting]:
        """Read files like `read_toml`.

        Args:
            folder: `name` is relative to it.
            above: the real paths of the files that extend this one.
        """
        try:
            path = find_config(name, folder)
            problem = path_problem(str(path))
        except ValueError as error:
            problem = str(error)
        if problem:
            self.problems.append(f"{origin}: {problem}")
            return {}
        real = os.path.realpath(path)
        if real in above:
            names = (os.path.basename(name) for name in (*above, real))
            self.problems.append(f"{path}: extends itself: {' -> '.join(names)}")
            return {}
        if len(above) > TOML_DEPTH:
            self.problems.append(
                f"{origin}: more than {TOML_DEPTH} files extend each other; merge some"
            )
            return {}
        if real not in self._by_file:
            self._by_file[real] = self._read(path, origin, (*above, real))
        return self._by_file[real]

    def _read(self, path: Path, origin: str, above: tuple[str, ...]) -> dict[str, Setting]:
        text, tables = self._parse(path, origin)
        bases = tables.pop("extends", [])
        lines = line_numbers(text)

        def locate(key: str) -> str:
            # All keys of an inline table share its line.
            line = next((lines[k] for k in prefixes(key) if k in lines), None)
            return f"{path}:{line}" if line else str(path)

        bases = [bases] if isinstance(bases, str) else bases
        at = f"{locate('extends')}: extends"
        if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
            self.problems.append(
                f"{at}: got {brief(bases)}, must be the name of a TOML file or a list of names"
            )
            bases = []
        base_settings: dict[str, Setting] = {}
        for base in bases:
            base_settings |= self.settings(base, path.parent, at, above)
        file_settings = {key: Setting(value, locate(key)) for key, value in flatten(tables)}
        return base_settings | rename_old_keys(file_settings, self.problems, self.warnings)

    def _parse(self, path: Path, origin: str) -> tuple[str, dict[str, Any]]:
        """The file's text and its tables, both empty if something is wrong with it."""
        try:
            text = text_of(read_regular(path, self._remaining_bytes, links=True))
            self._remaining_bytes -= len(text)
            tables = tomli.loads(text)
        except OSError as error:
            hint = _suggestion(path) if isinstance(error, FileNotFoundError) else ""
            self.problems.append(f"{origin}: can't read {path}: {error.strerror or error}{hint}")
        except UnicodeDecodeError as error:
            self.problems.append(
                f"{origin}: can't read {path}: not UTF-8 text (byte {error.start}: {error.reason})"
            )
        # an integer of thousands of digits, or nested too deeply
        except (ValueError, RecursionError) as error:
            escape = "hex value" in str(error) or "Unescaped" in str(error)
            hint = "; in double quotes a \\ begins an escape: use single quotes" if escape else ""
            self.problems.append(f"{path}: not valid TOML: {error}{hint}")
        else:
            if problem := size_problem(tables):
                self.problems.append(f"{path}: {problem}")
            else:
                return text, _expand_here(tables, os.path.abspath(path.parent))
        return "", {}


def _expand_here(value: Any, folder: str) -> Any:
    """Tables with `HERE` replaced by the folder."""
    if isinstance(value, dict):
        return {key: _expand_here(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expand_here(inner, folder) for inner in value]
    if isinstance(value, str) and (value == HERE or value.startswith(f"{HERE}/")):
        return folder + value.removeprefix(HERE)
    return value


def _suggestion(path: Path) -> str:
    """The end of a message about a missing file: a shipped configuration, or a file beside it, of
    nearly that name.
    """
    neighbors = sorted(file.stem for file in islice(path.parent.glob("*.toml"), NEAR_FILES))
    if path.suffix == ".toml" and (hint := did_you_mean(path.stem, neighbors)):
        return hint.replace("'?", ".toml'?")
    return did_you_mean(path.stem, shipped_configs())


def size_problem(tables: dict[str, Any]) -> str | None:
    """Why TOML tables hold more than any configuration does; None if they don't."""
    level: list[Any] = [tables]
    values = 0
    for _ in range(TOML_DEPTH):
        next_level: list[Any] = []
        for table in level:
            for key in table if isinstance(table, dict) else ():
                if len(key) > KEY_LENGTH:
                    return f"the key {brief(key)} has more than {KEY_LENGTH} characters"
            for value in table.values() if isinstance(table, dict) else table:
                if isinstance(value, int) and not -(2**63) <= value < 2**63:
                    return "an integer is too large for 64 bits"
                if isinstance(value, dict | list):
                    next_level.append(value)
                values += 1
        level = next_level
        if values > TOML_VALUES:
            return f"more than {TOML_VALUES:,} values"
    return f"tables or lists are nested more than {TOML_DEPTH} levels deep" if level else None


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of the settings in nested tables. A table that isn't the schema's is one
    value if it is empty or has a name that a dotted key can't hold.
    """
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and (
            key in _TABLES or (value and all(re.fullmatch("[^.]+", inner) for inner in value))
        ):
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


_HEADER = re.compile(r"[ \t]*\[{1,2}([^\[\]\n]+)\]")
_KEY = re.compile(
    r"""[ \t]*((?:[\w-]+|"[^"\n]*"|'[^'\n]*')(?:[ \t]*\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*'))*)[ \t]*="""  # noqa: E501
)
# Strings (multi-line ones first) and comments, which can hide a line end or a bracket; brackets;
# line ends.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]''',
    re.DOTALL,
)


def line_numbers(text: str) -> dict[str, int]:
    """Line of each key and table header of a valid TOML text (tomli keeps no positions)."""
    numbers: dict[str, int] = {}
    table = ""
    number = 1
    offset = 0
    for start in _statements(text):
        number += text.count("\n", offset, start)
        offset = start
        if header := _HEADER.match(text, start):
            table = _unquote(header[1]) + "."
            numbers.setdefault(table[:-1], number)
        elif key := _KEY.match(text, start):
            numbers.setdefault(table + _unquote(key[1]), number)
    return numbers


def _statements(text: str) -> Iterator[int]:
    """Offsets of the lines that don't continue a string, list or inline table from an earlier
    line.
    """
    depth = 0
    yield 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if token[0] == "\n" and depth == 0:
            yield token.end()


def _unquote(key: str) -> str:
    return ".".join(name.strip().strip("\"'") for name in key.split("."))
