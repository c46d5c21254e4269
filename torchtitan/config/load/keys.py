"""The dotted keys of the schema, and the values given for them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from torchtitan.config.sections.schema import Config


@dataclass(frozen=True)
class Setting:
    """A value and where it was set: `file.toml:12` or `--training.steps`."""

    value: Any
    where: str


def fields_of(
    model: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, Any, type[BaseModel]]]:
    """(dotted key, pydantic field, section class) of every key below `model`, in order."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields_of(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info, model


FIELDS = {key: info for key, info, _ in fields_of(Config)}
"""Every key of the schema."""


def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, by dotted key, that aren't the schema's defaults."""
    defaults = {
        key: FIELDS[key].get_default(call_default_factory=True) for key in values if key in FIELDS
    }
    return {
        key: value for key, value in values.items() if key not in defaults or value != defaults[key]
    }


def prefixes(key: str) -> list[str]:
    """`a.b.c`, `a.b`, `a`."""
    names = key.split(".")
    return [".".join(names[:n]) for n in range(len(names), 0, -1)]


def message_start(where: str, key: str) -> str:
    """The start of a message about `key`: `file.toml:3: section.key`, or the flag alone."""
    return where if where == f"--{key}" else f"{where}: {key}"
