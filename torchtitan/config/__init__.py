"""From arguments to a checked configuration, in milliseconds and without torch."""

import signal
import sys
from dataclasses import dataclass

from torchtitan.config.derive import derive, gradient_accumulation_steps
from torchtitan.config.load import load_config
from torchtitan.config.schema import Config
from torchtitan.config.validate import validate

__all__ = [
    "Config",
    "Resolved",
    "gradient_accumulation_steps",
    "load_config",
    "resolve",
]


@dataclass(frozen=True)
class Resolved:
    """A configuration that is complete and legal for a number of ranks, and where its values came from."""

    config: Config
    sources: dict[str, str]
    """Key to where it was set."""
    formulas: dict[str, str]
    """Key to the formula by which it was derived."""
    warnings: list[str]


def resolve(argv: list[str], world: int) -> Resolved:
    """Load, derive and validate; prints help and exits if asked to.

    Raises:
        ConfigError: every mistake of the first of these stages that finds any.
    """
    for flag in ("--help", "-h"):
        if flag in argv:
            from torchtitan.config.render import help_text

            following = argv[argv.index(flag) + 1 :]
            named = following[0].replace("-", "_") if following and not following[0].startswith("-") else None
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
            print(help_text(named))
            sys.exit(0)
    loaded = load_config(argv)
    config, formulas = derive(loaded.config, world)
    validate(config, world, loaded.sources)
    return Resolved(config, loaded.sources, formulas, loaded.warnings)
