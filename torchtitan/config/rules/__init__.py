"""Why a configuration can't run: one table of rules, each about some keys and some facts."""

import importlib
from dataclasses import replace

from torchtitan.config.derive import axis_degrees, degrees_fill
from torchtitan.config.rules.table import RULES, Accelerator, Facts, check, problems
from torchtitan.config.sections.schema import Config
from torchtitan.utils.torch_compat import torch_is_before_2_13

__all__ = ["RULES", "Accelerator", "Facts", "check", "problems", "validate"]

SUBJECTS = ("layout", "features", "training", "checkpoints", "data", "model", "pipeline", "machine")
"""The files of the table, in the order in which problems are reported."""

for _subject in SUBJECTS:
    importlib.import_module(f"{__name__}.{_subject}")


def validate(config: Config, world: int, sources: dict[str, str] | None = None) -> None:
    """Check a derived configuration by what is known without looking at anything: `world` ranks.

    Args:
        sources: key to where it was set, named in the messages.

    Raises:
        ConfigError: every problem.
    """
    facts = Facts(world=world, old_torch=torch_is_before_2_13())
    if degrees_fill(config, world):
        facts = replace(facts, layout=axis_degrees(config.parallelism))
    check(config, facts, sources)
