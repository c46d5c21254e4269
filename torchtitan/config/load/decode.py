"""One strict configuration from TOML files and the command line.

Each file and the command line is one layer: `{dotted key: Setting}`, with old spellings renamed.
The layers are merged (extended files, file, command line) and validated at once, so every mistake
is reported at once, each with where it was set.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from torchtitan.config.load.command_line import config_flags
from torchtitan.config.load.compat import (
    MICROBATCHES,
    RENAMED,
    UNSUPPORTED,
    convert_flavor,
    convert_microbatch_count,
    drop_unsupported,
    rename_old_keys,
)
from torchtitan.config.load.extend import unknown_names
from torchtitan.config.load.keys import FIELDS, Setting, message_start, prefixes
from torchtitan.config.load.messages import explain_errors
from torchtitan.config.load.toml_file import read_toml
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import ConfigError


@dataclass
class LoadedConfig:
    """The configuration as written, before values are derived."""

    config: Config
    sources: dict[str, str]
    """Key to where it was set; keys at their default are absent."""
    warnings: list[str] = field(default_factory=list)


def load_config(argv: list[str]) -> LoadedConfig:
    """The configuration of command-line arguments and the TOML file they name.

    Raises:
        ConfigError: every mistake in the files and the arguments.
    """
    problems: list[str] = []
    warnings: list[str] = []
    settings: dict[str, Setting] = {}
    flags = rename_old_keys(dict(config_flags(argv, problems)), problems, warnings)
    if file := flags.get("job.config_file"):
        settings |= read_toml(str(file.value), "--job.config_file", problems, warnings)
    settings |= flags
    convert_microbatch_count(settings, problems, warnings)
    convert_flavor(settings, warnings)
    settings = drop_unsupported(settings, _SUGGESTIONS, problems, warnings)
    config = _validate(settings, problems)
    # else that module may register more, and isn't imported here
    if "experimental.custom_import" not in settings:
        problems += unknown_names(settings)
    if problems or config is None:
        raise ConfigError(sorted(problems, key=_file_order))
    return LoadedConfig(config, {key: setting.where for key, setting in settings.items()}, warnings)


_SUGGESTIONS = [*FIELDS, *RENAMED, MICROBATCHES, *UNSUPPORTED]


def _validate(settings: dict[str, Setting], problems: list[str]) -> Config | None:
    tables: dict[str, Any] = {}
    for key, setting in settings.items():
        names = key.split(".")
        table = tables
        for name in names[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                problems.append(
                    f"{message_start(setting.where, key)}: unknown key; {'.'.join(names[:-1])} is "
                    "not a table"
                )
                break
        else:
            table[names[-1]] = setting.value

    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        first_below: dict[str, Setting] = {}
        for key, setting in settings.items():
            for above in prefixes(key):
                first_below.setdefault(above, setting)

        def where(key: str) -> str:
            # an element of a list is reported where its list was set
            exact = (settings[k] for k in prefixes(key) if k in settings)
            setting = next(exact, None) or first_below.get(key)
            return message_start(setting.where, key) if setting else key

        problems += explain_errors(error, Config, where, _SUGGESTIONS)
        return None


def _file_order(problem: str) -> tuple[bool, str, int]:
    """Sort key: problems in files first, from top to bottom; the others stay in order."""
    at = re.match(r"(.*?):(\d+): ", problem)
    return (False, at[1], int(at[2])) if at else (True, "", 0)
