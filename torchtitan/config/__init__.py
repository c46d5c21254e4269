"""Turns command-line arguments into a checked configuration, without torch."""

from dataclasses import dataclass

from torchtitan.config.derive import derive, gradient_accumulation_steps, warnings
from torchtitan.config.load.command_line import show_help
from torchtitan.config.load.decode import LoadedConfig, load_config
from torchtitan.config.load.extend import extend
from torchtitan.config.rules import validate
from torchtitan.config.sections.schema import Config

__all__ = [
    "Config",
    "Resolved",
    "complete",
    "gradient_accumulation_steps",
    "load_config",
    "resolve",
]


@dataclass(frozen=True)
class Resolved:
    """A complete, valid configuration for a number of ranks, and where its values came from."""

    config: Config
    sources: dict[str, str]
    """Key to where it was set."""
    formulas: dict[str, str]
    """Key to the formula that derived its value."""
    warnings: list[str]


def resolve(argv: list[str], world: int, *, check: bool = True) -> Resolved:
    """Load, derive and validate a configuration for `world` ranks. `--help [SECTION]` prints help
    and exits.

    Args:
        check: False leaves validation to `preflight`, which has more facts, and so reports all
        problems at once.

    Raises:
        ConfigError: every mistake that the first failing stage finds.
    """
    show_help(argv)
    return complete(load_config(argv), world, check=check)


def complete(loaded: LoadedConfig, world: int, *, check: bool = True) -> Resolved:
    """Import the user's module, derive and validate, for `world` ranks.

    Args:
        check: as for `resolve`.

    Raises:
        ConfigError: every mistake that the first failing stage finds.
    """
    base = extend(loaded.config, loaded.sources)
    config, formulas = derive(base, world)
    if check:
        validate(config, world, loaded.sources)
    derived = warnings(base, config, formulas, loaded.sources)
    return Resolved(config, loaded.sources, formulas, [*loaded.warnings, *derived])
