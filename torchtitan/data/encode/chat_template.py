"""A tokenizer's chat template: a Jinja file, which runs in a sandbox.

It gets what transformers gives a template: `messages`, `tools` (none), the special tokens by their
names, `add_generation_prompt`, `raise_exception`, `tojson`, `{% generation %}`. Only the date
differs: `strftime_now` returns the date in Llama 3's templates, because a row must not depend on
the current day.
"""

import datetime
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan.data.encode.special_tokens import CONFIG, read_json
from torchtitan.data.read.opening import BadDocument
from torchtitan.utils.errors import UserError, reason
from torchtitan.utils.files import read_regular, text_of
from torchtitan.utils.limits import CHAT_TEMPLATE_BYTES, CONVERSATION_CHARACTERS

START, END, BREAK = MARKS = "\ufdd0\ufdd1\ufdd2"
"""Noncharacters that mark the beginning and end of a turn, and a place in a message after the first
character of a special token's spelling.
"""
_PADDING = {"center", "expandtabs", "ljust", "rjust", "zfill"}
"""String methods that pad to any requested length."""
_GROWING = ("batch", "indent", "join", "replace", "slice", "tojson", "truncate", "wordwrap")
"""Filters whose result may be longer than their input."""
_WIDE = re.compile(r"[0-9]{5}|\*")
"""Widths in a format that may be too large."""
_TODAY = datetime.date(2024, 7, 26)
_FILE = "chat_template.jinja"
_OLD_FILE = "chat_template.json"
"""As older versions of transformers' processors write it."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """Renders messages."""

    def __init__(
        self, tokenizer: Path, special: Mapping[str, str | None], key: str, file: Path | None = None
    ):
        """
        Args:
            tokenizer: the tokenizer's file; the template is beside it, unless `file` names it.
            special: special tokens by the names that templates use, such as `eos_token`.
            key: a configuration key, for errors.

        Raises:
            UserError: there is no template, or it can't be parsed.
        """
        config = read_json(tokenizer.with_name(CONFIG), key)
        if file is not None:
            self.path, source = file, _read_template(file, "model.chat_template")
        else:
            self.path, source = _find_template(tokenizer, config, key)
        self.source = source
        self.special = {role: name for role, name in special.items() if name is not None}
        self.marks_turns = bool(_GENERATION.search(source))
        """Whether the template marks the assistant's text."""
        content = json.dumps([source, sorted(self.special.items())])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{key}: the chat template in {self.path} can't be parsed: line {error.lineno}: "
                f"{error.message}"
            ) from None
        except RecursionError:
            raise UserError(
                f"{key}: the chat template in {self.path} can't be parsed: it is nested too deeply"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        """The text of messages, and with `prompt` the beginning of the assistant's turn.

        Raises:
            BadDocument: the template refuses them, fails, or renders too much.
        """
        chunks = []
        length = 0
        try:
            for chunk in self._template.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **self.special,
            ):
                chunks.append(chunk)
                length += len(chunk)
                if length > CONVERSATION_CHARACTERS:
                    break
        except Exception as error:  # a template may fail in any way
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadDocument(
                "refused by the chat template", f"refused by the chat template: {reason}"
            ) from None
        if length > CONVERSATION_CHARACTERS:
            raise BadDocument(
                "too long", f"a conversation of more than {CONVERSATION_CHARACTERS:,} characters"
            )
        return "".join(chunks)

    @property
    def not_by_prefixes(self) -> str:
        """The error about a template whose turns aren't the text that each message adds."""
        return (
            f"model.hf_assets_path: the chat template in {self.path} renders turns differently "
            "once others follow, or begins the assistant's turn differently in its prompt, so the "
            "text of the assistant can't be told. Mark it in the template: {% generation %} before "
            "the content and {% endgeneration %} after the token that ends the turn"
        )


def _find_template(tokenizer: Path, config: Mapping[str, Any], key: str) -> tuple[Path, str]:
    """The file of a template, and the template."""
    file = tokenizer.with_name(_FILE)
    if file.is_file():
        return file, _read_template(file, key)
    template = config.get("chat_template")
    path = tokenizer.with_name(CONFIG)
    if template is None:
        path = tokenizer.with_name(_OLD_FILE)
        template = read_json(path, key).get("chat_template")
    if isinstance(template, list):
        templates = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        if "default" not in templates:
            raise UserError(
                f'{key}: none of the chat templates in {path} is named "default"; there are '
                f"{', '.join(map(str, templates)) or 'none'}. Write the one to use to {file}"
            )
        template = templates["default"]
    if not isinstance(template, str):
        raise UserError(
            f"{key}: the tokenizer of model.hf_assets_path has no chat template; name a file with "
            f"one as model.chat_template, or write one to {file}"
        )
    if len(template) > CHAT_TEMPLATE_BYTES:
        raise UserError(
            f"{key}: the chat template in {path} is longer than {CHAT_TEMPLATE_BYTES:,} characters"
        )
    return path, template


def _read_template(file: Path, key: str) -> str:
    try:
        return text_of(read_regular(file, CHAT_TEMPLATE_BYTES, links=True))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: can't read {file}: {reason(error)}") from None


class _Generation(Extension):
    """`{% generation %}`: puts marks around its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{START}{caller()}{END}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses operations that would fill the memory; `range` has a limit already."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        wide = attr in ("format", "format_map") and isinstance(obj, str) and _WIDE.search(obj)
        if wide or attr in _PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        times = [abs(x) for x in (left, right) if isinstance(x, int | float)]
        if operator == "*" and len(times) < 2 and _product(left, right) > CONVERSATION_CHARACTERS:
            raise SecurityError("a product is too long")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError("a format is too wide")
        if operator == "**" and max(times, default=0) > 100:
            raise SecurityError("a power of too large numbers")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(called, "__name__", "") in ("replace", "join", "translate"):
            _check_growth([getattr(called, "__self__", None), *args, *kwargs.values()])
        return super().call(context, called, *args, **kwargs)


def _product(*values: Any) -> float:
    """The product of the two largest lengths or numbers among `values`, nested lengths included."""
    sizes = [_extent(value) for value in values]
    return math.prod(sorted(sizes)[-2:])


def _extent(value: Any) -> float:
    if isinstance(value, int | float):
        return abs(value)
    if isinstance(value, list | tuple):
        return sum(len(entry) if isinstance(entry, str | bytes) else 1 for entry in value)
    return len(value) if isinstance(value, Sized) else 0


def _check_growth(values: Sequence[Any]) -> None:
    """
    Raises:
        SecurityError: the result of `values` may be far longer than any conversation.
    """
    if _product(*values) > 10 * CONVERSATION_CHARACTERS:
        raise SecurityError("a text or a list would be too long")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with Jinja's mark of functions that it passes the environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_growth([*args, *kwargs.values()])
        return function(*args, **kwargs)

    return checked


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    for name in ("center", "format"):
        del environment.filters[name]
    for name in _GROWING:
        environment.filters[name] = _bounded(environment.filters[name])
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
