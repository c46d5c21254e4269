"""Validation errors in this project's words, with suggestions for misspelt keys and values."""

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tomli
from pydantic import BaseModel, ValidationError

from torchtitan.config.load.keys import fields_of, prefixes
from torchtitan.utils.errors import MAX_PROBLEMS, did_you_mean
from torchtitan.utils.wording import brief

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
    "finite_number": "a finite number",
    "none_required": "null",
}


_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
"""Kind of an error to the bound in its context, and its words."""

NAMES = tomli.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
OTHER_NAMES: dict[str, str] = NAMES["other_programs"]
"""Keys of other programs, and what they are here."""


def explain_errors(
    error: ValidationError,
    model: type[BaseModel],
    where: Callable[[str], str],
    extra_keys: Iterable[str] = (),
) -> list[str]:
    """One message per pydantic error: where, what is wrong, what is allowed, what was probably
    meant.

    Args:
        where: maps a dotted key to the start of its message.
        extra_keys: keys to suggest for a misspelt one, besides the keys of `model`.
    """
    keys = [*(key for key, _, _ in fields_of(model)), *extra_keys]
    out = []
    # Suggestions cost milliseconds each, so only problems that are shown get one.
    for number, item in enumerate(error.errors(include_url=False)):
        # The tag of a union, which is written like this, isn't a key.
        key = ".".join(str(step) for step in item["loc"] if not str(step).startswith("<"))
        if item["type"] == "extra_forbidden":
            section = isinstance(item["input"], dict)
            hint = suggest_key(key, keys, section=section) if number < MAX_PROBLEMS else ""
            text = f"unknown {'section' if section else 'key'}{hint}"
        else:
            text = explain_value(item, hints=number < MAX_PROBLEMS)
        start = where(key)
        out.append(f"{start}: {text}" if start else text)
    return out


def explain_value(item: Any, *, hints: bool = True) -> str:
    """The problem with a value, from one entry of `ValidationError.errors()`.

    Args:
        hints: suggest a legal value that is spelt alike.
    """
    context = item.get("ctx", {})
    value = brief(item["input"])
    kind = item["type"]
    if kind == "literal_error":
        legal = re.findall(r"'([^']+)'", context["expected"])
        hint = did_you_mean(str(item["input"])[:100], legal) if hints else ""
        return f"got {value}, must be {context['expected']}{hint}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"got {value}, must be {words} {context[bound]}"
    if kind == "missing":
        return "must be set"
    if kind == "value_error":
        return str(context["error"])
    if type_words := _TYPES.get(kind.removesuffix("_type").removesuffix("_parsing")):
        return f"got {value}, must be {type_words}"
    return f"got {value}: {item['msg'][0].lower() + item['msg'][1:]}"


def suggest_key(key: str, keys: list[str], *, section: bool = False) -> str:
    """The end of a message about an unknown key or section: the key of the same meaning, or the
    closest of those with the closest last name.
    """
    name = key.rpartition(".")[2]
    if name in OTHER_NAMES:
        return f"; here it is {OTHER_NAMES[name]}"
    choices = sorted({table for k in keys for table in prefixes(k)[1:]}) if section else keys
    names = {k.rpartition(".")[2] for k in choices}
    last = difflib.get_close_matches(name, names, 1, 0.75)
    same = [k for k in choices if k.rpartition(".")[2] in last]
    near = difflib.get_close_matches(key, same, 1, 0.0)
    return f"; did you mean {near[0]!r}?" if near else ""
