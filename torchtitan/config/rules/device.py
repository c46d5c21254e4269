"""What a configuration needs of the device: refused alike by the trainer on the device, and by the
planner for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.config.rules.support import FLOAT8, GROUPED_FLOAT8, GROUPED_MX, MX, uses
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import ConfigError

Capability = tuple[int, int]


@dataclass(frozen=True)
class Accelerator:
    """A kind of device."""

    name: str
    """As torch reports it; `a CPU`."""
    capability: Capability | None
    """As torch reports it: NVIDIA's compute capability, AMD's gfx942 as 9.4, (0, 0) of a CPU. None:
    unknown, and nothing is refused.
    """


def check_device(config: Config, device: Accelerator) -> None:
    """Check that `device` supports the 8-bit matrix products that `model.converters` needs.

    Raises:
        ConfigError: it doesn't.
    """
    capability = device.capability
    if capability is None:
        return
    problems = [
        f"{key}: needs an NVIDIA GPU of compute capability {needed[0]}.{needed[1]} "
        f"({gpu}) or newer, this is "
        f"{device.name}; set {key}.{emulation} to try it without one"
        for key, needed, gpu, emulation in _needs(config)
        if capability < needed
    ]
    if problems:
        raise ConfigError(problems)


def _needs(config: Config) -> Iterator[tuple[str, Capability, str, str]]:
    """Each section of a converter that isn't emulated, the capability that it needs, and what would
    emulate it.
    """
    linear = config.quantize.linear
    grouped = config.quantize.grouped_mm
    float8 = "emulate = true"
    mx = 'recipe_name = "mxfp8_emulated"'
    if uses(config, FLOAT8) and not linear.float8.emulate:
        tensorwise = linear.float8.recipe_name in (None, "tensorwise")
        yield (
            "quantize.linear.float8",
            *(((8, 9), "Ada or Hopper") if tensorwise else ((9, 0), "Hopper")),
            float8,
        )
    if uses(config, GROUPED_FLOAT8) and not grouped.float8.emulate:
        yield "quantize.grouped_mm.float8", (9, 0), "Hopper", float8
    if uses(config, GROUPED_MX) and grouped.mx.recipe_name != "mxfp8_emulated":
        yield "quantize.grouped_mm.mx", (10, 0), "Blackwell", mx
    if uses(config, MX) and linear.mx.recipe_name != "mxfp8_emulated":
        yield "quantize.linear.mx", (10, 0), "Blackwell", mx
