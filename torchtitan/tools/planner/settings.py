"""Settings of a configuration: values by their keys."""

from operator import attrgetter
from typing import Any

from torchtitan.config.derive import replace
from torchtitan.config.sections.schema import Config

Settings = dict[str, Any]


def apply_settings(config: Config, settings: Settings) -> Config:
    """`config` with the settings."""
    for key, value in settings.items():
        config = replace(config, key, value)
    return config


def read(config: Config, key: str) -> Any:
    """The value of a section or a dotted key."""
    return attrgetter(key)(config)
