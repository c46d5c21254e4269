"""Validation errors in this project's words, with suggestions for misspelt keys and values."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from torchtitan.config.keys import fields_of, prefixes
from torchtitan.utils.errors import did_you_mean

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
    """One message per pydantic error: the place, what is wrong, what is allowed, what was probably meant.

    Args:
        where: maps a dotted key to the start of its message.
        known: keys to suggest for a misspelt one, besides those of `model`.
    """
    keys = [*(key for key, _, _ in fields_of(model)), *known]
    out = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            section = isinstance(item["input"], dict)
            text = f"unknown {'section' if section else 'key'}{suggest_key(key, keys, section=section)}"
        else:
            text = explain_value(item)
        start = where(key)
        out.append(f"{start}: {text}" if start else text)
    return out


def explain_value(item: Any) -> str:
    """What is wrong with a value, from one entry of `ValidationError.errors()`."""
    context, got, kind = item.get("ctx", {}), item["input"], item["type"]
    if kind == "literal_error":
        hint = did_you_mean(str(got), re.findall(r"'([^']+)'", context["expected"]))
        return f"got {got!r}, must be {context['expected']}{hint}"
    if kind == "value_error":
        return str(context["error"])
    if allowed := _TYPES.get(kind.removesuffix("_type").removesuffix("_parsing")):
        return f"got {got!r}, must be {allowed}"
    return f"got {got!r}: {item['msg'][0].lower() + item['msg'][1:]}"


def suggest_key(key: str, known: list[str], *, section: bool = False) -> str:
    """The end of a message about a misspelt key or section: the closest whole key, else the closest last name."""
    choices = sorted({table for k in known for table in prefixes(k)[1:]}) if section else known
    near = difflib.get_close_matches(key, choices, 1, 0.75)
    if not near:
        names = {k.rpartition(".")[2]: k for k in reversed(choices)}
        last = difflib.get_close_matches(key.rpartition(".")[2], names, 1, 0.75)
        near = [names[name] for name in last] or difflib.get_close_matches(key, choices, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
