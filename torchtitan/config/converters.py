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


def converts_linear(config: Config, fqn: str, inputs: int, outputs: int) -> bool:
    """Whether `model.converters` round the operands of this linear layer: it isn't excluded by
    name, and each rank's part has a multiple of the kernels' unit in both sizes: `torch._scaled_mm`
    aligns 16 elements, and 32 share a scale in the OCP Microscaling Formats, v1.0.
    """
    linear = config.quantize.linear
    float8 = uses(config, FLOAT8)
    names = linear.float8.filter_fqns if float8 else linear.mx.filter_fqns
    unit = (16 if float8 else 32) * config.parallelism.tensor_parallel_degree
    if not (float8 or uses(config, MX)) or inputs % unit or outputs % unit:
        return False
    if names_any([name for name in names if name != SMALL_LAYERS], fqn):
        return False
    if not float8 or SMALL_LAYERS not in names:
        return True
    return gains_by_float8(linear.float8.recipe_name, inputs, outputs)


def converts_experts(config: Config, fqn: str) -> bool:
    """Whether `model.converters` round the operands of the grouped products of these experts."""
    grouped = config.quantize.grouped_mm
    float8 = uses(config, GROUPED_FLOAT8) and names_any(grouped.float8.fqns, fqn)
    return float8 or (uses(config, GROUPED_MX) and names_any(grouped.mx.fqns, fqn))


def gains_by_float8(recipe: str | None, inputs: int, outputs: int) -> bool:
    """Whether Float8 is faster for a layer of this size on an H100, by the measurements in
    torchao's float8 README.
    """
    if recipe in (None, "tensorwise"):
        return inputs > 4096 or outputs > 1024
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
