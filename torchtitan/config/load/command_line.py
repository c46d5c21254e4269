"""The command line: configuration flags, alone or among a command's own options.

Flags are `--section.key value`, `--section.key=value`, or a bare `--section.flag` for true; `-` and
`_` are the same.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import tomli
from pydantic import TypeAdapter, ValidationError

from torchtitan.config.load.compat import UNSUPPORTED, NoEffect, current_key
from torchtitan.config.load.keys import FIELDS, Setting
from torchtitan.config.load.toml_file import size_problem
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
        argv: what follows the command's name. `--help SECTION` prints the keys of a section and
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
    named = [str(setting.value) for key, setting in config_flags(flags, []) if key == _FILE]
    if options.config and named:
        parser.error(f"two configurations, {options.config} and {named[-1]}: name one")
    if named:
        options.config = named[-1]
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

    A flag is the configuration's if its name has a dot, or is `--config` or `--config_file`; after
    `--` every flag is. Its values are the words up to the next flag, `.toml` file or shipped
    configuration.

    Raises:
        ConfigError: there are thousands of words.
    """
    _check_length(argv)
    command_words: list[str] = []
    flags: list[str] = []
    separated = False
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word == "--" and not separated:
            separated = True
        elif word.startswith("--") and (separated or _is_config_flag(word)):
            end = position + _count_values(argv, position - 1)
            flags += argv[position - 1 : end]
            position = end
        else:
            command_words.append(word)
    return command_words, flags


def show_help(argv: list[str], *, whole: bool = True) -> None:
    """Print the help on the configuration and exit, if `argv` asks for it by `--help [SECTION]`.

    Args:
        whole: answer a `--help` without a section, too.

    Raises:
        ConfigError: there is no such section.
    """
    flag = next((flag for flag in ("--help", "-h") if flag in argv), None)
    if flag is None:
        return
    section = None
    following = argv[argv.index(flag) + 1 :]
    if following and not following[0].startswith("-"):
        section = following[0].replace("-", "_")
    if section or whole:
        from torchtitan.config.load.render import help_text

        print(help_text(section), flush=True)  # now: `run_main` ends quietly if a pipe is closed
        sys.exit(0)


def _check_length(argv: list[str]) -> None:
    if len(argv) > TOML_VALUES:
        raise ConfigError(
            [f"the command line has {len(argv):,} words; at most {TOML_VALUES:,} are read"]
        )


def _is_config_flag(word: str) -> bool:
    key = _key_of(word)
    return "." in key and not key.startswith(".")


def _count_values(argv: list[str], index: int) -> int:
    """Number of words after the flag at `index` that are its values."""
    word = argv[index]
    if "=" in word:
        return 0
    kind = _kind_of(_key_of(word))
    takes_single = kind is not None and kind is not bool and get_origin(kind) is not list
    count = 0
    known = shipped_configs()
    for value in argv[index + 1 :]:
        is_file = value.endswith(".toml") or value in known
        if value.startswith("--") or (is_file and not (takes_single and count == 0)):
            break
        count += 1
    return count


# ---- flags of the configuration


def config_flags(argv: list[str], problems: list[str]) -> Iterator[tuple[str, Setting]]:
    """(key, setting) of every flag; what is wrong with the arguments is appended to `problems`.

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
        try:
            value = _parse_value(key, values)
        except ValueError as error:
            problems.append(f"--{key}: {error}")
            continue
        tables: Any = value
        for table in reversed(key.split(".")):
            tables = {table: tables}
        if problem := size_problem(tables):
            problems.append(f"--{cut(key, 100)}: {problem}")
        else:
            yield key, Setting(value, f"--{key}")


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
    return None if get_origin(kind) is dict else kind


def _parse_value(key: str, words: list[str]) -> Any:
    """The value of the words after a flag, read as the field's type."""
    kind = _kind_of(key)
    if kind is None:
        return _guess(words)
    optional = type(None) in get_args(kind)
    options = [a for a in get_args(kind) if a is not type(None)] if optional else [kind]
    if optional and words in (["None"], ["none"], ["null"]):
        return None
    if get_origin(options[0]) is list and len(words) == 1 and words[0].startswith(("[[", "[{")):
        return _guess(words)
    if get_origin(options[0]) is list:
        words = [item.strip() for word in words for item in word.strip("[]").split(",")]
        return [word.strip("\"'") for word in words if word]
    if not words and kind is bool:
        return True
    if not words:
        raise ValueError("needs a value")
    if len(words) > 1:
        raise ValueError(f"takes one value, got {brief(' '.join(words))}")
    try:
        return TypeAdapter(kind).validate_strings(words[0])
    except ValidationError:
        return words[0]  # of the wrong type: validation reports it


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
