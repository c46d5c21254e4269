"""One table of rules that refuse configurations, each about some keys and some facts."""

import importlib
from dataclasses import replace

from torchtitan.config.derive import axis_degrees, ranks_of
from torchtitan.config.rules.table import (
    ABSENT,
    HERE,
    RULES,
    Accelerator,
    Facts,
    check,
    located,
    problems,
)
from torchtitan.config.sections.schema import Config
from torchtitan.utils.torch_compat import torch_is_before_2_13

__all__ = [
    "ABSENT",
    "HERE",
    "RULES",
    "Accelerator",
    "Facts",
    "check",
    "located",
    "problems",
    "validate",
    "with_ranks",
]

SUBJECTS = ("layout", "features", "training", "checkpoints", "data", "model", "pipeline", "machine")
"""The files of the table, in the order in which problems are reported."""

for _subject in SUBJECTS:
    importlib.import_module(f"{__name__}.{_subject}")


def validate(config: Config, world: int, sources: dict[str, str] | None = None) -> None:
    """Check a derived configuration for `world` ranks, without files, model or machine.

    Args:
        sources: key to where it was set, named in the messages.

    Raises:
        ConfigError: every problem.
    """
    check(config, with_ranks(Facts(), config, world), sources)


def with_ranks(facts: Facts, config: Config, world: int) -> Facts:
    """`facts` with the facts that follow from a derived configuration and its number of ranks."""
    facts = replace(facts, world=world, old_torch=torch_is_before_2_13())
    if ranks_of(config) == world:
        facts = replace(facts, layout=axis_degrees(config.parallelism))
    return facts
