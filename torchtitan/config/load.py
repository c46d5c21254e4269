"""One strict decoder for TOML files and the command line.

Each file and the command line is one layer: `{dotted key: (value, where it was set)}`, with old spellings renamed.
The layers are merged (extended files, file, command line) and validated by pydantic in one go: every mistake is
reported, each with its place.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import BaseModel, TypeAdapter, ValidationError

from torchtitan.config.compat import (
    MICROBATCHES,
    RENAMED,
    RENAMED_SECTIONS,
    UNSUPPORTED,
    Tuning,
    refusals,
    renamed,
)
from torchtitan.config.schema import Config
from torchtitan.utils.errors import ConfigError, did_you_mean


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


def _prefixes(key: str) -> list[str]:
    """`a.b.c`, `a.b`, `a`."""
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


FIELDS = {key: info for key, info, _ in fields_of(Config)}
_TABLES = {table for key in (*FIELDS, *UNSUPPORTED) for table in _prefixes(key)[1:]} | RENAMED_SECTIONS.keys()
_FOREIGN = {key.split(".")[0] for key in UNSUPPORTED} - Config.model_fields.keys()  # sections the schema lacks


def load_config(argv: list[str]) -> LoadedConfig:
    """The configuration that command-line arguments ask for, including the TOML file they name.

    Raises:
        ConfigError: all mistakes in the files and the arguments.
    """
    problems: list[str] = []
    warnings: list[str] = []
    given: dict[str, Setting] = {}
    flags = _modernize(dict(_command_line(argv, problems)), problems, warnings)
    if file := flags.get("job.config_file"):
        given |= _read_toml(Path(str(file.value)), "--job.config_file", problems, warnings)
    given |= flags
    _count_to_size(given, problems, warnings)
    loaded = _take_out_unsupported(given, problems)
    config = _validate(loaded, problems)
    if problems or config is None:
        raise ConfigError(sorted(problems, key=_file_order))
    return LoadedConfig(config, {key: setting.where for key, setting in loaded.items()}, warnings)


def _file_order(problem: str) -> tuple[bool, str, int]:
    """Files from top to bottom, then the rest as found."""
    place = re.match(r"(.*?):(\d+): ", problem)
    return (False, place[1], int(place[2])) if place else (True, "", 0)


# ---- TOML


def _read_toml(
    path: Path, named_at: str, problems: list[str], warnings: list[str], seen: tuple[Path, ...] = ()
) -> dict[str, Setting]:
    """The settings of a file, which was named at `named_at`, and of those it extends."""
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
    lines = _line_numbers(text)

    def place(key: str) -> str:
        # An inline table has one line for all its keys.
        line = next((lines[k] for k in _prefixes(key) if k in lines), None)
        return f"{path}:{line}" if line else str(path)

    bases = [bases] if isinstance(bases, str) else bases
    at = f"{place('extends')}: extends"
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        problems.append(f"{at}: got {bases!r}, must be the name of a TOML file or a list of names")
        bases = []
    given: dict[str, Setting] = {}
    for base in bases:
        given |= _read_toml(path.parent / base, at, problems, warnings, (*seen, path.resolve()))
    own = {key: Setting(value, place(key)) for key, value in _flatten(tables)}
    return given | _modernize(own, problems, warnings)


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and (value or prefix + key in _TABLES):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_HEADER = re.compile(r"[ \t]*\[{1,2}[ \t]*([^\[\]\n]+?)[ \t]*\]")
_KEY = re.compile(r"""[ \t]*((?:[\w-]+|"[^"\n]*"|'[^'\n]*')(?:[ \t]*\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*'))*)[ \t]*=""")
# What can hide a line end or a bracket (strings, the long ones first; comments), brackets, and line ends.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]''', re.DOTALL
)


def _line_numbers(text: str) -> dict[str, int]:
    """Line of each key and table header of a valid TOML text. tomli keeps no positions."""
    numbers: dict[str, int] = {}
    table = ""
    for start in _statements(text):
        number = text.count("\n", 0, start) + 1
        if header := _HEADER.match(text, start):
            table = _normal(header[1]) + "."
            numbers.setdefault(table[:-1], number)
        elif key := _KEY.match(text, start):
            numbers.setdefault(table + _normal(key[1]), number)
    return numbers


def _statements(text: str) -> Iterator[int]:
    """Offsets of the lines that aren't inside a string, list or inline table begun on an earlier line."""
    depth = 0
    yield 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if token[0] == "\n" and depth == 0:
            yield token.end()


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
    key = renamed(key) or key
    entry = UNSUPPORTED.get(key)
    kind = FIELDS[key].annotation if key in FIELDS else entry.kind if isinstance(entry, Tuning) else None
    if kind is None or get_origin(kind) is dict:
        return _guess(words)  # an open table or its entry, an unsupported or unknown key: any TOML value
    optional = type(None) in get_args(kind)
    options = [a for a in get_args(kind) if a is not type(None)] if optional else [kind]
    if optional and words in (["None"], ["none"], ["null"]):
        return None
    if get_origin(options[0]) is list and len(words) == 1 and words[0].startswith(("[[", "[{")):
        return _guess(words)
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


def _modernize(layer: dict[str, Setting], problems: list[str], warnings: list[str]) -> dict[str, Setting]:
    """One file's or the command line's settings under today's names. Before merging: a later layer wins by any name."""
    out: dict[str, Setting] = {}
    for old, setting in layer.items():
        key = renamed(old)
        if key is not None:
            warnings.append(f"{setting.where}: {old} is called {key} now")
            if key in layer:
                problems.append(f"{_place(setting.where, old)}: {key} is set too ({layer[key].where}); remove {old}")
                continue
        out[key or old] = setting
    return out


def _count_to_size(given: dict[str, Setting], problems: list[str], warnings: list[str]) -> None:
    """0.1's number of pipeline microbatches, as today's rows of one."""
    if (count := given.pop(MICROBATCHES, None)) is None or count.value is None:
        return
    key, rows_key = "parallelism.pipeline_parallel_microbatch_size", "training.local_batch_size"
    rows = given[rows_key].value if rows_key in given else FIELDS[rows_key].default
    place = _place(count.where, MICROBATCHES)
    if key in given:
        problems.append(f"{place}: {key} is set too ({given[key].where}); remove {MICROBATCHES}")
    elif type(count.value) is not int or type(rows) is not int or count.value < 1 or rows % count.value:
        problems.append(f"{place}: got {count.value!r}, must divide {rows_key} {rows}; better set {key}")
    else:
        warnings.append(f"{count.where}: {MICROBATCHES} is {key} now, {rows_key} {rows} / {count.value}")
        given[key] = Setting(rows // count.value, count.where)


def _take_out_unsupported(given: dict[str, Setting], problems: list[str]) -> dict[str, Setting]:
    """The settings that the schema decides about, once the others are known to ask for nothing."""
    out: dict[str, Setting] = {}
    for key, setting in given.items():
        texts: list[str] = []
        entry = UNSUPPORTED.get(key)
        if isinstance(entry, Tuning):
            try:
                TypeAdapter(entry.kind).validate_python(setting.value, strict=True)
            except ValidationError as error:
                texts = [_explain_value(error.errors()[0])]
        elif entry is not None:
            texts = list(refusals(key, setting.value))
        elif key.split(".")[0] in _FOREIGN:
            texts = ["unknown key" + _meant(key, _SUGGESTED, False)]
        else:
            out[key] = setting
        problems += [f"{_place(setting.where, key)}: {text}" for text in texts]
    return out


def _validate(given: dict[str, Setting], problems: list[str]) -> Config | None:
    nested: dict[str, Any] = {}
    for key, setting in given.items():
        parts = key.split(".")
        table = nested
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                problems.append(f"{_place(setting.where, key)}: unknown key; {'.'.join(parts[:-1])} is no table")
                break
        else:
            table[parts[-1]] = setting.value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:

        def where(key: str) -> str:
            above = (given[k] for k in _prefixes(key) if k in given)  # an element of a list has its list's place
            below = (s for k, s in given.items() if k.startswith(key + "."))
            setting = next(above, None) or next(below, None)
            return _place(setting.where, key) if setting else key

        problems += explain_errors(error, Config, where, _SUGGESTED)
        return None


def _place(where: str, key: str) -> str:
    """`file.toml:3: section.key`, or the flag alone, which already is the key."""
    return where if where == f"--{key}" else f"{where}: {key}"


_SUGGESTED = [*FIELDS, *RENAMED, MICROBATCHES, *UNSUPPORTED]
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "dict": "a table",
    "model": "a table",
    "finite_number": "a finite number",
}


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
        if item["type"] == "extra_forbidden":
            section = isinstance(item["input"], dict)
            text = f"unknown {'section' if section else 'key'}{_meant(key, keys, section)}"
        else:
            text = _explain_value(item)
        place = where(key)
        out.append(f"{place}: {text}" if place else text)
    return out


def _explain_value(item: Any) -> str:
    """What is wrong with a value, from one of pydantic's errors."""
    context, got, kind = item.get("ctx", {}), item["input"], item["type"]
    if kind == "literal_error":
        hint = did_you_mean(str(got), re.findall(r"'([^']+)'", context["expected"]))
        return f"got {got!r}, must be {context['expected']}{hint}"
    if kind == "value_error":
        return str(context["error"])
    if stem := _TYPES.get(kind.removesuffix("_type").removesuffix("_parsing")):
        return f"got {got!r}, must be {stem}"
    return f"got {got!r}: {item['msg'][0].lower() + item['msg'][1:]}"


def _meant(key: str, keys: list[str], section: bool) -> str:
    """A hint for a misspelt key: near as a whole, or else near in its last name, in whichever section."""
    choices = sorted({table for k in keys for table in _prefixes(k)[1:]}) if section else keys
    near = difflib.get_close_matches(key, choices, 1, 0.75)
    if not near:
        names = {k.rpartition(".")[2]: k for k in reversed(choices)}
        last = difflib.get_close_matches(key.rpartition(".")[2], names, 1, 0.75)
        near = [names[name] for name in last] or difflib.get_close_matches(key, choices, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
