"""The command line: configuration flags, alone or among a command's own options.

Flags are `--section.key value`, `--section.key=value`, or a bare `--section.flag` for true and
`--section.no-flag` for false; `-` and `_` are the same. A list is TOML, or else words: see
`_parse_list`.
"""

import argparse
import sys
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli
from pydantic import TypeAdapter, ValidationError

from torchtitan.config.load.compat import UNSUPPORTED, NoEffect, current_key
from torchtitan.config.load.keys import FIELDS, Setting
from torchtitan.config.load.messages import OTHER_NAMES
from torchtitan.config.load.render import help_text, to_toml_value
from torchtitan.config.load.toml_file import size_problem
from torchtitan.config.types import Text
from torchtitan.utils.assets import shipped_configs
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.limits import TOML_VALUES
from torchtitan.utils.wording import brief, cut

_FILE = "job.config_file"
_SHORT = {"config": _FILE, "config_file": _FILE}


# ---- a command's own options


def parse_args(
    parser: argparse.ArgumentParser, argv: list[str], *, file_required: bool = False
) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line that mixes a command's own options with a configuration, in any order:

        torchtitan COMMAND [CONFIG.toml] [options] [--section.key value ...]

    Args:
        parser: declares the command's own options. A positional `config` is added: the TOML file.
        argv: the words after the command's name. `--help SECTION` prints the keys of a section and
            exits.
        file_required: a TOML file must be given.

    Returns:
        The command's options, whose `config` is the TOML file or None; and the arguments for
        `resolve` or `load_config`, the TOML file included.

    Raises:
        ConfigError: `--help SECTION` names no section.
    """
    show_help(argv, whole=False)
    command_words, flags = split_args(argv)
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the configuration")
    if parser.usage is None:
        usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
        parser.usage = f"{usage} [--section.key value ...]"
    parser.epilog = (
        parser.epilog
        or "--section.key value overrides the file. --help SECTION lists a section's keys; "
        "`-- --help` lists all."
    )
    options = parser.parse_intermixed_args(command_words)
    files = [str(setting.value) for key, setting in config_flags(flags, []) if key == _FILE]
    if options.config and files:
        parser.error(f"two configurations, {options.config} and {files[-1]}: name one")
    if files:
        options.config = files[-1]
        flags = _without_file(flags)
    elif file_required and not options.config:
        parser.error("name the configuration: CONFIG.toml")
    if options.config:
        flags = [f"--{_FILE}={options.config}", *flags]
    return options, flags


def _without_file(flags: list[str]) -> list[str]:
    """`flags` without those that name the TOML file."""
    out: list[str] = []
    position = 0
    while position < len(flags):
        end = position + 1 + _count_values(flags, position)
        out += [] if _key_of(flags[position]) == _FILE else flags[position:end]
        position = end
    return out


def split_args(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command's own words from the configuration's flags.

    A flag is the configuration's if its name has a dot, or is `--config`, `--config_file` or
    another program's (`OTHER_NAMES`); after `--` every flag is. Its values are the words up to the
    next flag, `.toml` file or shipped configuration.

    Raises:
        ConfigError: there are thousands of words.
    """
    _check_length(argv)
    command_words: list[str] = []
    flags: list[str] = []
    after_dashes = False
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word == "--" and not after_dashes:
            after_dashes = True
        elif word.startswith("--") and (after_dashes or _is_config_flag(word)):
            end = position + _count_values(argv, position - 1)
            flags += argv[position - 1 : end]
            position = end
        else:
            command_words.append(word)
    return command_words, flags


def show_help(argv: list[str], *, whole: bool = True) -> None:
    """Print the help on the configuration and exit, if `argv` asks for it by `--help [SECTION]`.

    Args:
        whole: also answer a `--help` without a section.

    Raises:
        ConfigError: there is no such section.
    """
    flag = next((flag for flag in ("--help", "-h") if flag in argv), None)
    if flag is None:
        return
    section = None
    next_words = argv[argv.index(flag) + 1 :]
    if next_words and not next_words[0].startswith("-"):
        section = next_words[0].replace("-", "_")
    if section or whole:
        print(help_text(section), flush=True)  # now: `run_main` ends quietly if a pipe is closed
        sys.exit(0)


def _check_length(argv: list[str]) -> None:
    if len(argv) > TOML_VALUES:
        raise ConfigError(
            [f"the command line has {len(argv):,} words; at most {TOML_VALUES:,} are read"]
        )


def _is_config_flag(word: str) -> bool:
    key = _key_of(word)
    return ("." in key and not key.startswith(".")) or key in OTHER_NAMES


def _count_values(argv: list[str], index: int) -> int:
    """Number of words after the flag at `index` that are its values."""
    word = argv[index]
    if "=" in word:
        return 0
    kind = _kind_of(_key_of(word))
    needs_value = kind is not None and kind is not bool
    count = 0
    configs = shipped_configs()
    for value in argv[index + 1 :]:
        is_file = value.endswith(".toml") or value in configs
        is_file &= not (needs_value and count == 0)
        if value.startswith("--") or is_file:
            break
        count += 1
    return count


# ---- flags of the configuration


def config_flags(argv: list[str], problems: list[str]) -> Iterator[tuple[str, Setting]]:
    """(key, setting) of every flag; mistakes in the arguments are appended to `problems`.

    Raises:
        ConfigError: there are thousands of words.
    """
    _check_length(argv)
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            problems.append(f"unexpected argument {brief(word)}: flags are --section.key value")
            continue
        _, equals, text = word.partition("=")
        key = _key_of(word)
        values = [text] if equals else []
        while not equals and position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
        spelling = key
        try:
            if (positive := _positive_key(key)) is not None:
                key, value = positive, _false(positive, values)
            else:
                value = _parse_value(key, values)
        except ValueError as error:
            problems.append(f"--{spelling}: {error}")
            continue
        tables: Any = value
        for table in reversed(key.split(".")):
            tables = {table: tables}
        if problem := size_problem(tables):
            problems.append(f"--{cut(spelling, 100)}: {problem}")
        else:
            yield key, Setting(value, f"--{spelling}")


def flag_text(key: str, value: Any) -> str:
    """The text after `--key=` that `config_flags` reads as `value`. The text of an
    optional key can't be one of the words that unset it: `none`, `None`, `null`.
    """
    kind = _kind_of(key)
    if not isinstance(value, str):
        return to_toml_value(value)
    if kind is None:  # a word such as 4 or true would be a value of TOML
        return to_toml_value(value)
    return to_toml_value([value]) if _element(kind) == Text else value


def _key_of(flag: str) -> str:
    key = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    return _SHORT.get(key, key)


def _kind_of(key: str) -> Any:
    """The type of a key's value; None if any value may follow (open tables, unknown keys)."""
    key = current_key(key) or key
    entry = UNSUPPORTED.get(key)
    kind = None
    if key in FIELDS:
        kind = FIELDS[key].annotation
    elif isinstance(entry, NoEffect):
        kind = entry.kind
    elif entry is not None and any(off is False for off in entry.off):
        kind = bool
    return None if get_origin(kind) is dict else kind


def _element(kind: Any) -> Any:
    """The type of the elements of a list, the simplest if there are several; None if `kind` isn't
    one.
    """
    kinds = [kind, *get_args(kind)]
    return next((get_args(k)[0] for k in reversed(kinds) if get_origin(k) is list), None)


def _positive_key(key: str) -> str | None:
    """The key that `section.no_key` or `no_section.key` sets to false, or None."""
    section, _, name = key.rpartition(".")
    for positive in (f"{section}.{name.removeprefix('no_')}", key.removeprefix("no_")):
        if positive != key and _kind_of(positive) is bool:
            return positive
    return None


def _false(key: str, words: list[str]) -> bool:
    if words:
        raise ValueError(f"takes no value; --{key} takes true or false")
    return False


def _parse_value(key: str, words: list[str]) -> Any:
    """The value of the words after a flag, read as the field's type."""
    kind = _kind_of(key)
    if kind is None:
        return _guess(words)
    optional = type(None) in get_args(kind)
    if optional and words in (["None"], ["none"], ["null"]):
        return None
    if not words and kind is bool:
        return True
    if not words:
        raise ValueError("needs a value")
    if (element := _element(kind)) is not None:
        return _parse_list(element, words)
    if len(words) > 1:
        raise ValueError(f"takes one value, got {brief(' '.join(words))}")
    try:
        return TypeAdapter(_without_bounds(kind)).validate_strings(words[0])
    except ValidationError:
        return words[0]  # of the wrong type: validation reports it


def _without_bounds(kind: Any) -> Any:
    """A type without its bounds, which validation reports with the value as a number."""
    if get_origin(kind) is Annotated:
        return _without_bounds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(_without_bounds(inner) for inner in get_args(kind))]  # noqa: UP007
    return kind


def _parse_list(element: Any, words: list[str]) -> list[Any]:
    """The list in the words after a flag: a list in TOML, or else its elements. Names may also
    have commas between them; text keeps its commas, brackets and quotes. Nothing, as in `--key=`,
    is the empty list.

    Raises:
        ValueError: names in brackets that aren't a list in TOML.
    """
    is_text = element == Text
    array = _toml_array(words[0]) if len(words) == 1 else None
    if array is not None and not (is_text and any(not isinstance(item, str) for item in array)):
        return array
    if words == [""]:
        return []
    if is_text:
        return words
    whole = " ".join(words)
    if whole.startswith("[") and whole.endswith("]"):
        raise ValueError(
            f"got {brief(whole)}, not a list of TOML, whose strings have quotes; quote it for the "
            "shell, too" + (", or write a,b" if _is_name(element) else "")
        )
    if not _is_name(element):
        return [_guess([word]) for word in words]
    names = (name.strip() for word in words for name in word.split(","))
    return [name for name in names if name]


def _is_name(element: Any) -> bool:
    return get_origin(element) is Literal or get_args(element)[:1] == (str,)


def _toml_array(word: str) -> list[Any] | None:
    """The array that `word` is in TOML, with no comment or other text."""
    if not word.lstrip().startswith("["):
        return None
    try:
        array = tomli.loads(f"value = {word}")["value"]
        tomli.loads(f"value = [{word}]")  # invalid if it is followed by a comment or another key
    except (ValueError, RecursionError):
        return None
    return array if isinstance(array, list) else None


def _guess(words: list[str]) -> Any:
    if not words:
        return True
    if len(words) > 1:
        return [_guess([word]) for word in words]
    try:
        return tomli.loads(f"value = {words[0]}")["value"]
    except tomli.TOMLDecodeError:
        return {"True": True, "False": False}.get(words[0], words[0])
    # an integer of thousands of digits, or nested too deeply
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got {brief(words[0])}, not a value of TOML: {error}") from None
