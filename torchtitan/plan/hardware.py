"""The machines that a plan can be made for: `hardware.toml`, or a file in its format that `--calibrate` wrote."""

from functools import cache
from pathlib import Path
from typing import Literal

import tomli
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from torchtitan.utils.errors import ConfigError, did_you_mean
from torchtitan.utils.hardware import FILE


class Hardware(BaseModel):
    """One set of constants. Rates in FLOP/s and bytes/s of one GPU; `hardware.toml` tells what each means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    device_names: tuple[str, ...] = ()
    """As torch names the device."""
    device: Literal["cuda", "cpu"] = "cuda"
    memory_gib: PositiveFloat
    bf16: PositiveFloat
    fp8: NonNegativeFloat
    fp32: PositiveFloat
    memory_bandwidth: PositiveFloat
    link: PositiveFloat
    network: PositiveFloat
    gpus_per_node: PositiveInt
    gemm_bf16: PositiveFloat
    gemm_fp8: PositiveFloat
    gemm_fp8_rowwise: PositiveFloat
    attention: PositiveFloat
    attention_backward: PositiveFloat
    ring_attention: PositiveFloat
    eager: PositiveFloat
    async_tp: NonNegativeFloat
    link_efficiency: PositiveFloat
    memory_efficiency: PositiveFloat
    network_efficiency: PositiveFloat
    overlap_slowdown: NonNegativeFloat
    node_variation: NonNegativeFloat
    latency: NonNegativeFloat
    launch: NonNegativeFloat
    step_overhead: NonNegativeFloat
    host_link: PositiveFloat
    reserve_gib: NonNegativeFloat
    band: NonNegativeFloat

    @property
    def usable_gib(self) -> float:
        """What the allocator can have."""
        return self.memory_gib - self.reserve_gib

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth that large kernels reach."""
        return self.memory_bandwidth * self.memory_efficiency

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes/s per rank of a ring over `ranks` ranks that are `stride` ranks apart.

        Within a node it is the link's. Between nodes it is that of the network ports of the ranks that a node has in
        the ring, for a ring enters and leaves a node once; never more than the link's.
        """
        link = self.link * self.link_efficiency
        if ranks * stride <= self.gpus_per_node:
            return link
        inside = max(1, self.gpus_per_node // stride)
        return min(link, self.network * self.network_efficiency * min(inside, ranks))


@cache
def load_hardware(path: Path = FILE) -> dict[str, Hardware]:
    """Every hardware of a file, by name.

    Raises:
        ConfigError: the file can't be read, or a table is not complete and right.
    """
    try:
        tables = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"--hardware: can't read {path}: {getattr(error, 'strerror', None) or error}"]) from None
    shared = load_shared() | tables.pop("shared", {})
    tables.pop("peak_bf16", None)
    found, problems = {}, []
    for name, table in tables.items():
        try:
            found[name] = Hardware.model_validate({"name": name} | shared | table)
        except ValidationError as error:
            problems += [f"{path}: {name}.{e['loc'][0]}: {e['msg'][0].lower()}{e['msg'][1:]}" for e in error.errors()]
    if problems:
        raise ConfigError(problems)
    return found


def load_shared() -> dict[str, float]:
    """The constants that a table need not repeat."""
    return tomli.loads(FILE.read_text(encoding="utf-8"))["shared"]


def find_hardware(name: str) -> Hardware:
    """The hardware called `name`, or the first of the TOML file `name`.

    Raises:
        ConfigError: there is none.
    """
    if name.endswith(".toml"):
        found = load_hardware(Path(name))
        if not found:
            raise ConfigError([f"--hardware: {name} describes no hardware; make one with --calibrate {name}"])
        return next(iter(found.values()))
    known = load_hardware()
    if name not in known:
        hint = did_you_mean(name.lower(), known)
        raise ConfigError([f"--hardware: no hardware {name!r} (there is {', '.join(known)}, or a TOML file){hint}"])
    return known[name]
