"""One strict decoder for TOML files and the command line.

Both are flattened to `{dotted key: (value, where it was set)}`, merged (extended files, file, command line), renamed
where the spelling is old, and validated by pydantic in one go: every mistake is reported, each with its place.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import BaseModel, TypeAdapter, ValidationError

from torchtitan.config.compat import UNSUPPORTED, refusals, renamed
from torchtitan.config.schema import Config
from torchtitan.utils.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A value somebody gave, and where: `file.toml:12` or `--training.steps`."""

    value: Any
    where: str


@dataclass
class LoadedConfig:
    """The configuration as written, before values are derived."""

    config: Config
    sources: dict[str, str]
    """Key to where it was set; keys at their default are absent."""
    warnings: list[str] = field(default_factory=list)


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, type[BaseModel]]]:
    """(dotted key, annotation, section class) of every key below `model`, in order."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields_of(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info, model


FIELDS = {key: info for key, info, _ in fields_of(Config)}
_TABLES = {key.rpartition(".")[0] for key in FIELDS} | {key.rpartition(".")[0] for key in UNSUPPORTED}
_OPEN = {key for key, info in FIELDS.items() if get_origin(info.annotation) is dict}  # tables with keys of any name


def load_config(argv: list[str]) -> LoadedConfig:
    """The configuration that command-line arguments ask for, including the TOML file they name.

    Raises:
        ConfigError: all mistakes in the files and the arguments.
    """
    problems: list[str] = []
    given: dict[str, Setting] = {}
    flags = dict(_command_line(argv, problems))
    file = flags.get("job.config_file")
    if file:
        given |= _read_toml(Path(file.value), problems)
    given |= flags
    loaded, warnings = _modernize(given, problems)
    config = _validate(loaded, problems)
    if problems or config is None:
        raise ConfigError(problems)
    return LoadedConfig(config, {key: setting.where for key, setting in loaded.items()}, warnings)


# ---- TOML


def _read_toml(path: Path, problems: list[str], seen: tuple[Path, ...] = ()) -> dict[str, Setting]:
    """The settings of a file and of those it extends."""
    if path.resolve() in seen:
        problems.append(f"{path}: extends itself: {' -> '.join(p.name for p in (*seen, path))}")
        return {}
    try:
        text = path.read_text()
        tables = tomli.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--job.config_file: can't read {path}: {getattr(error, 'strerror', None) or error}")
        return {}
    except tomli.TOMLDecodeError as error:
        problems.append(f"{path}: not valid TOML: {error}")
        return {}
    bases = tables.pop("extends", [])
    lines = _line_numbers(text)
    given: dict[str, Setting] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        given |= _read_toml(path.parent / str(base), problems, (*seen, path.resolve()))
    for key, value in _flatten(tables):
        line = next((lines[k] for k in _prefixes(key) if k in lines), None)
        given[key] = Setting(value, f"{path}:{line}" if line else str(path))
    return given


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and (value or prefix + key in _TABLES):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _prefixes(key: str) -> Iterable[str]:
    """`a.b.c`, `a.b`, `a`: an inline table has one line for all its keys."""
    parts = key.split(".")
    return (".".join(parts[:n]) for n in range(len(parts), 0, -1))


_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def _line_numbers(text: str) -> dict[str, int]:
    """Line of each key and table header of a valid TOML text. tomli keeps no positions."""
    numbers: dict[str, int] = {}
    table, quotes = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if quotes:  # inside a string of several lines
            quotes = "" if quotes in line else quotes
            continue
        if header := _HEADER.match(line):
            table = _normal(header[1]) + "."
            numbers.setdefault(table[:-1], number)
        elif key := _KEY.match(line):
            numbers.setdefault(table + _normal(key[1]), number)
        quotes = next((q for q in ('"""', "'''") if line.count(q) % 2), "")
    return numbers


def _normal(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


# ---- command line


def _command_line(argv: list[str], problems: list[str]) -> Iterator[tuple[str, Setting]]:
    """(key, setting) of every flag: `--section.key value`, `--section.key=value`, or a bare `--section.flag`."""
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            problems.append(f"unexpected argument {word!r}: flags are --section.key value")
            continue
        flag, equals, text = word.partition("=")
        key = flag[2:].replace("-", "_")
        key = {"config": "job.config_file", "config_file": "job.config_file"}.get(key, key)
        values = [text] if equals else []
        while not equals and position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
        try:
            yield key, Setting(_from_text(key, values), f"--{key}")
        except ValueError as error:
            problems.append(f"--{key}: {error}")


def _from_text(key: str, words: list[str]) -> Any:
    """The value that the words after a flag stand for; the field's type tells how to read them."""
    info = FIELDS.get(key)
    if info is None:
        # An open table's entry, an old spelling (read by its new key), or unsupported or unknown: any TOML value.
        if (new := renamed(key)) in FIELDS:
            return _from_text(str(new), words)
        return _guess(words)
    kind = info.annotation
    options = [a for a in get_args(kind) if a is not type(None)] if type(None) in get_args(kind) else [kind]
    if len(options) < len(get_args(kind)) and words in (["None"], ["none"], ["null"]):
        return None
    if get_origin(options[0]) is list:
        words = [part.strip() for word in words for part in word.strip("[]").split(",")]
        return [word.strip("\"'") for word in words if word]
    if not words and kind is bool:
        return True
    if len(words) != 1:
        raise ValueError(f"takes one value, got {' '.join(words)!r}" if words else "needs a value")
    try:
        return TypeAdapter(kind).validate_strings(words[0])
    except ValidationError:
        return words[0]  # of the wrong type: left to the decoder, which says so


def _guess(words: list[str]) -> Any:
    if not words:
        return True
    if len(words) > 1:
        return [_guess([word]) for word in words]
    try:
        return tomli.loads(f"value = {words[0]}")["value"]
    except tomli.TOMLDecodeError:
        return {"True": True, "False": False}.get(words[0], words[0])


# ---- validation


def _modernize(given: dict[str, Setting], problems: list[str]) -> tuple[dict[str, Setting], list[str]]:
    """Rename old spellings, and take out what isn't supported after checking that it asks for nothing."""
    out: dict[str, Setting] = {}
    warnings = []
    for old, setting in given.items():
        key = renamed(old)
        if key is not None:
            warnings.append(f"{setting.where}: {old} is called {key} now")
        key = key or old
        if key in UNSUPPORTED:
            problems += [f"{_place(setting.where, key)}: {text}" for text in refusals(key, setting.value)]
        else:
            out[key] = setting
    return out, warnings


def _validate(given: dict[str, Setting], problems: list[str]) -> Config | None:
    nested: dict[str, Any] = {}
    for key, setting in given.items():
        parts = key.split(".")
        table = nested
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break
        else:
            table[parts[-1]] = setting.value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:

        def where(key: str) -> str:
            exact = given.get(key) or next((s for k, s in given.items() if k.startswith(key + ".")), None)
            return _place(exact.where, key) if exact else key

        problems += explain_errors(error, Config, where, UNSUPPORTED)
        return None


def _place(where: str, key: str) -> str:
    """`file.toml:3: section.key`, or the flag alone, which already is the key."""
    return where if where == f"--{key}" else f"{where}: {key}"


_TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "a string", "list": "a list"}


def explain_errors(
    error: ValidationError, model: type[BaseModel], where: Callable[[str], str], known: Iterable[str] = ()
) -> list[str]:
    """pydantic's errors in this project's words: place, what is wrong, what is required, what may have been meant.

    Args:
        where: the place of a dotted key, for the beginning of each message.
        known: further keys to suggest for a misspelt one.
    """
    keys = [*(key for key, _, _ in fields_of(model)), *known]
    out = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        key = ".".join(path)
        context, got = item.get("ctx", {}), item["input"]
        kind = item["type"]
        if kind == "extra_forbidden":
            text = f"unknown {'section' if isinstance(got, dict) else 'key'}{_meant(key, keys, isinstance(got, dict))}"
        elif kind == "literal_error":
            near = difflib.get_close_matches(str(got), re.findall(r"'([^']+)'", context["expected"]), 1)
            text = f"got {got!r}, must be {context['expected']}" + (f"; did you mean {near[0]!r}?" if near else "")
        elif kind == "value_error":
            text = str(context["error"])
        elif (stem := kind.removesuffix("_type")) in _TYPES or kind.endswith("_parsing"):
            text = f"got {got!r}, must be {_TYPES.get(stem.removesuffix('_parsing'), item['msg'])}"
        elif kind == "model_type":
            text = f"got {got!r}, must be a table"
        else:
            text = f"got {got!r}: {item['msg'][0].lower() + item['msg'][1:]}"
        place = where(key)
        out.append(f"{place}: {text}" if place else text)
    return out


def _meant(key: str, keys: list[str], section: bool) -> str:
    """A hint for a misspelt key: the same section first, then the same last name anywhere, then anything near."""
    choices = sorted({k.rpartition(".")[0] for k in keys} - {""}) if section else keys
    near = difflib.get_close_matches(key, choices, 1, 0.75)
    last = key.rpartition(".")[2]
    near = (
        near or [k for k in choices if k.rpartition(".")[2] == last][:1] or difflib.get_close_matches(key, choices, 1)
    )
    return f"; did you mean {near[0]!r}?" if near else ""
