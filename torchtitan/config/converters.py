"""Entries of `model.converters`: their names, and the layers they convert."""

from collections.abc import Iterable

from torchtitan.config.sections.schema import Config

FLOAT8 = ("float8", "quantize.linear.float8")
MX = ("mx", "quantize.linear.mx")
GROUPED_FLOAT8 = ("quantize.grouped_mm.float8",)
GROUPED_MX = ("quantize.grouped_mm.mx",)
"""Names in `model.converters`; a converter may have two."""
SMALL_LAYERS = "auto_filter_small_kn"
"""Entry of `quantize.linear.float8.filter_fqns` that skips layers too small to gain."""


def uses(config: Config, names: tuple[str, ...]) -> bool:
    """Whether `model.converters` holds one of `names`."""
    return not set(names).isdisjoint(config.model.converters)


def names_any(substrings: Iterable[str], fqn: str) -> bool:
    """Whether one of `substrings` occurs in the module name `fqn`."""
    return any(substring in fqn for substring in substrings)


def gains_by_float8(recipe: str | None, inputs: int, outputs: int) -> bool:
    """Whether Float8 is faster for a layer of this size on an H100, by the measurements in
    torchao's float8 README.
    """
    if recipe in (None, "tensorwise"):
        return inputs > 4096 or outputs > 1024
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
