"""Checks the names that a configuration chooses, and `[custom.*]`, against the registries."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from torchtitan.config.load.keys import Setting, message_start
from torchtitan.config.load.messages import explain_errors
from torchtitan.config.registry import (
    CHOICES,
    REGISTRIES,
    Custom,
    Section,
    data_sources,
    import_custom,
    tokenizers,
)
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import ConfigError, UserError, did_you_mean
from torchtitan.utils.wording import brief


def unknown_names(settings: Mapping[str, Setting]) -> Iterator[str]:
    """Messages on names for which nothing is built in or registered. Data may have any name."""
    for registry in CHOICES:
        setting = settings.get(registry.key)
        if setting is None or registry is data_sources:
            continue
        for name in setting.value if isinstance(setting.value, list) else [setting.value]:
            if isinstance(name, str) and (problem := registry.problem(name)):
                yield f"{message_start(setting.where, registry.key)}: {problem}"


def extend(config: Config, sources: Mapping[str, str]) -> Config:
    """Import `experimental.custom_import`, check names, and check and complete the `[custom.*]`
    tables.

    Args:
        sources: key to where it was set.

    Raises:
        ConfigError: the module can't be imported, or a name or table is wrong.
    """
    if config.experimental.custom_import:
        import_custom(config.experimental.custom_import)
    choices = {}
    for registry in CHOICES:
        section, name = registry.key.split(".")
        value = getattr(getattr(config, section), name)
        choices[registry.key] = Setting(value, sources.get(registry.key, "default"))
    problems = list(unknown_names(choices))
    tables: dict[str, Any] = {}
    classes = {
        name: keys for registry in REGISTRIES for name, keys in registry.registered.items() if keys
    }
    custom = config.custom.tables
    for name in dict.fromkeys([*custom, *(name for name in _names(config) if name in classes)]):
        if name not in classes:
            problems.append(
                f"{_nearest_start(f'custom.{name}', sources)}: {_unknown(name, classes, config)}"
            )
        else:
            tables[name] = _complete(name, custom.get(name, {}), classes[name], sources, problems)
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"custom": config.custom.model_copy(update=tables)})


def _names(config: Config) -> Iterator[str]:
    """All names by which the configuration chooses, registered or not."""
    yield config.optimizer.name
    yield config.lr_scheduler.name or ""
    yield config.training.loss
    yield config.model.tokenizer or ""
    yield from config.metrics.sinks
    yield from config.training.callbacks
    yield config.training.dataset
    yield config.validation.dataset
    yield from (source.dataset for source in config.training.sources)
    yield from (source.dataset for source in config.validation.sets)


def _unknown(name: str, classes: Mapping[str, Any], config: Config) -> str:
    if not config.experimental.custom_import:
        return (
            f"nothing is registered as {brief(name)}; name the module that does as "
            "experimental.custom_import"
        )
    names = ", ".join(sorted(classes)) or "nothing"
    return (
        f"{config.experimental.custom_import} registers nothing with keys as {brief(name)}; with "
        f"keys it registers {names}{did_you_mean(name, classes)}"
    )


def _complete(
    name: str, table: Any, keys: type[Section], sources: Mapping[str, str], problems: list[str]
) -> Section | None:
    """The table `[custom.NAME]` with its defaults; None if something is wrong with it."""
    if isinstance(table, Section):
        return table
    try:
        return keys.model_validate(table)
    except ValidationError as error:
        problems += explain_errors(
            error, keys, lambda key: _nearest_start(f"custom.{name}.{key}".rstrip("."), sources)
        )
        return None


def recorded_tokenizer(settings: Mapping[str, Any], step: object) -> Callable[[Path], Any] | None:
    """The registered tokenizer that a checkpoint's configuration names, or None.

    Args:
        settings: the configuration, as tables.
        step: the checkpoint, for messages.

    Raises:
        UserError: nothing is registered by that name, or not with these keys.
    """
    name = settings.get("model", {}).get("tokenizer")
    if name is None:
        return None
    table = settings.get("custom", {}).get(name, {})
    module = settings.get("experimental", {}).get("custom_import")
    if tokenizers.find(name) is None:
        raise UserError(
            f"{step} has the tokenizer {name!a}, which the module {module!a} registers; if you "
            f"trust that module, add --custom-import {module!a}"
        )
    problems: list[str] = []
    keys = tokenizers.registered[name]
    custom = Custom()
    if keys is not None:
        custom = custom.model_copy(update={name: _complete(name, table, keys, {}, problems)})
    if problems:
        raise ConfigError([f"{step}: {problem}" for problem in problems])
    return tokenizers.maker(name, custom)


def _nearest_start(key: str, sources: Mapping[str, str]) -> str:
    """The start of a message about a key: where it, or else a key above or below it, was set."""
    above = [".".join(key.split(".")[:n]) for n in range(key.count(".") + 1, 1, -1)]
    near = [
        *(k for k in above if k in sources),
        *(k for k in sources if k.startswith(f"{above[-1]}.")),
    ]
    return message_start(sources[near[0]], key) if near else key
