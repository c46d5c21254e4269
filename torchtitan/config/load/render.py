"""The schema as `--help`, `docs/reference/config.md` and a JSON Schema; a configuration as TOML."""

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from torchtitan.config.load.keys import fields_of
from torchtitan.config.registry import Custom
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import ConfigError, did_you_mean
from torchtitan.utils.wording import escaped

_WIDTH = 120
"""Columns of help and of a commented TOML file."""


def type_name(kind: Any, limits: Sequence[Any] = ()) -> str:
    """A field's type in words.

    Args:
        limits: the bounds that pydantic keeps beside the type.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        fields = [extra for extra in args[1:] if isinstance(extra, FieldInfo)]
        return type_name(args[0], [limit for field in fields for limit in field.metadata])
    if kind in (int, float) and limits:
        return f"{type_name(kind)} {_range(limits)}"
    if origin is Literal:
        return " | ".join(to_toml_value(arg) for arg in args)
    if origin in (Union, UnionType):
        return " | ".join(type_name(arg) for arg in args if arg is not type(None))
    if origin is list:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "tables"
    return {"str": "string", "int": "integer", "float": "number", "bool": "true | false"}[
        kind.__name__
    ]


def _range(limits: Sequence[Any]) -> str:
    """`0 to 1`, `above 0 to 10^6`, `0 to below 1`."""
    kinds = ("ge", "gt", "le", "lt")
    bounds = {
        kind: getattr(limit, kind) for limit in limits for kind in kinds if hasattr(limit, kind)
    }
    low = _bound(bounds["ge"]) if "ge" in bounds else f"above {_bound(bounds['gt'])}"
    high = _bound(bounds["le"]) if "le" in bounds else f"below {_bound(bounds['lt'])}"
    return f"{low} to {high}"


def _bound(value: float) -> str:
    """Large powers of two and ten as such, and the largest signed integer: 2^20, 10^9, 2^63 - 1."""
    for base in (10, 2):
        power = round(math.log(value, base)) if value > 1000 else 0
        for offset in (0, 1):
            if power and value == base**power - offset:
                return f"{base}^{power}{' - 1' if offset else ''}"
    return f"{value:g}"


def _sections() -> dict[str, tuple[type[BaseModel], list[tuple[str, Any]]]]:
    sections: dict[str, tuple[type[BaseModel], list[tuple[str, Any]]]] = {}
    for key, info, model in fields_of(Config):
        sections.setdefault(key.rpartition(".")[0], (model, []))[1].append((key, info))
    return sections


def _lists_of_tables(fields: list[tuple[str, Any]]) -> Iterator[tuple[str, type[BaseModel]]]:
    """(key, class of an element) of the keys that are lists of tables."""
    for key, info in fields:
        element = get_args(info.annotation)[0] if get_origin(info.annotation) is list else None
        if isinstance(element, type) and issubclass(element, BaseModel):
            yield key, element


def _documented_sections() -> Iterator[tuple[str, str, type[BaseModel], list[tuple[str, Any]]]]:
    """(name, header in TOML, class, keys) of every section and of every list of tables, which
    follows its section.
    """
    for name, (model, fields) in _sections().items():
        yield name, f"[{name}]", model, fields
        for key, element in _lists_of_tables(fields):
            yield key, f"[[{key}]]", element, list(element.model_fields.items())
    yield "custom", "[custom.NAME]", Custom, []


def prose(text: str | None) -> str:
    """A docstring with each paragraph on one line."""
    paragraphs = re.split(r"\n\s*\n", text or "")
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "unset" if value is None else to_toml_value(value)


def help_text(section: str | None = None) -> str:
    """The text of `--help`: all sections, or one with its subsections.

    Raises:
        ConfigError: there is no such section.
    """
    sections = [name for name, *_ in _documented_sections()]
    if section is not None and section not in sections:
        hint = did_you_mean(section, sections)
        raise ConfigError(
            [f"--help: no section {section!r} (sections: {', '.join(sections)}){hint}"]
        )
    lines = [
        "Flags are --section.key value or --section.key=value; - and _ are the same. A bare flag "
        'is true, --section.no-key false. A list is TOML, \'["a", "b"]\', or words.',
        "",
    ]
    lines += ["--config FILE (or --job.config_file) reads a TOML file; flags override it.", ""]
    lines += ["--help SECTION shows one section.", ""]
    for name, header, model, fields in _documented_sections():
        if section is None or f"{name}.".startswith(f"{section}."):
            lines += textwrap.wrap(f"{header}  {prose(model.__doc__)}", _WIDTH)
            for key, info in fields:
                flag = f"--{key}" if "." in key else key
                kind = type_name(info.annotation, info.metadata)
                lines += [f"  {flag}  {kind}  (default: {_default(info)})"]
                text = textwrap.fill(prose(info.description), _WIDTH - 6)
                lines += textwrap.indent(text, " " * 6).splitlines()
            lines += [""]
    return "\n".join(lines)


def markdown() -> str:
    """`docs/reference/config.md`."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from the schema by `torchtitan config --markdown`. Every key is also a",
        "[flag](command-line.md#values-of-flags): `--section.key value`.",
        "",
    ]
    for _, header, model, fields in _documented_sections():
        lines += [f"## {header}", "", prose(model.__doc__), ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"] if fields else []
        for key, info in fields:
            kind = type_name(info.annotation, info.metadata).replace("|", "\\|")
            text = prose(info.description).replace("|", "\\|")
            lines += [f"| `{key.rpartition('.')[2]}` | {kind} | `{_default(info)}` | {text} |"]
        lines += [""] if fields else []
    return "\n".join(lines)


def json_schema() -> str:
    """A JSON Schema of the TOML files, for completion and checks in editors."""
    schema = _join_descriptions(Config.model_json_schema())
    schema["properties"]["extends"] = {
        "description": "TOML file or files to extend: their values apply "
        "unless this file sets the key.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return json.dumps(schema, indent=1) + "\n"


def _join_descriptions(schema: Any) -> Any:
    """A JSON Schema whose descriptions have one line per paragraph."""
    if isinstance(schema, list):
        return [_join_descriptions(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _join_descriptions(value) for key, value in schema.items()}
    if isinstance(out.get("description"), str):
        out["description"] = prose(out["description"])
    return out


def to_toml(
    config: Config, *, only_changed: bool = False, comments: Mapping[str, str] | None = None
) -> str:
    """The configuration as TOML, which `load_config` reads back unchanged. Leaves out unset keys.

    Args:
        only_changed: also leave out keys at their default, and sections without other keys.
        comments: dotted key to the comment behind its value or, if that makes the line too long,
        above it.
    """
    lines: list[str] = []
    comments = comments or {}
    for name, (_, fields) in _sections().items():
        begin = len(lines)
        section = attrgetter(name)(config)
        tables = []
        lines += [f"[{name}]"]
        for key, info in fields:
            short = key.rpartition(".")[2]
            value = getattr(section, short)
            if only_changed and value == info.get_default(call_default_factory=True):
                continue
            if isinstance(value, dict):
                tables += [(key, value)] if value else []
            elif value is not None and key != "job.config_file":
                lines += _with_comment(f"{short} = {to_toml_value(value)}", comments.get(key))
        for key, table in tables:
            lines += ["", f"[{key}]"]
            for name_, value in table.items():
                comment = comments.get(f"{key}.{name_}")
                lines += _with_comment(f"{_toml_key(name_)} = {to_toml_value(value)}", comment)
        lines += [""]
        if only_changed and len(lines) == begin + 2:
            del lines[begin:]
    for name, table in config.custom.tables.items():
        lines += [f"[custom.{_toml_key(name)}]"]
        entries = dict(table) if isinstance(table, BaseModel | dict) else {}
        lines += [
            f"{_toml_key(k)} = {to_toml_value(v)}" for k, v in entries.items() if v is not None
        ]
        lines += [""]
    return "\n".join(lines)


def _with_comment(line: str, comment: str | None) -> list[str]:
    if comment is None:
        return [line]
    if len(line) + len(comment) + 4 <= _WIDTH and "\n" not in comment:
        return [f"{line}  # {comment}"]
    return [*textwrap.wrap(comment, _WIDTH, initial_indent="# ", subsequent_indent="# "), line]


def to_toml_value(value: Any) -> str:
    """One value in TOML. JSON strings are valid TOML, except that TOML requires more characters to
    be escaped.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_toml_key(k)} = {to_toml_value(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml_value(v) for v in value) + "]"
    if isinstance(value, str):
        return escaped(json.dumps(value, ensure_ascii=False))
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml_value(name)
