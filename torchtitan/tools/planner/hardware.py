"""Hardware that a plan can target: a table of `hardware.toml`, or of another file."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Literal

import tomli
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from torchtitan.config.rules import Accelerator
from torchtitan.utils.errors import ConfigError, did_you_mean
from torchtitan.utils.files import text_of

FILE = Path(__file__).with_name("hardware.toml")


class Hardware(BaseModel):
    """Constants of one GPU, in FLOP/s and bytes/s; `hardware.toml` explains each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str
    device_names: tuple[str, ...] = ()
    """Names that torch reports for the device."""
    device: Literal["cuda", "cpu"] = "cuda"
    capability: tuple[int, int] | None = None
    """Its compute capability in torch; None if a file doesn't set it: then nothing that depends on
    it is refused.
    """
    memory_gib: PositiveFloat
    bf16: PositiveFloat
    fp8: NonNegativeFloat
    fp32: PositiveFloat
    memory_bandwidth: PositiveFloat
    link: PositiveFloat = math.inf
    """Infinite if a file doesn't set it; `check_ranks` then refuses ranks that need it."""
    network: PositiveFloat = math.inf
    gpus_per_node: PositiveInt
    host_memory_gib: PositiveFloat | None = None
    """Memory of a host; None if a file doesn't set it."""
    gpus_per_host: PositiveInt | None = None
    """GPUs that one launcher starts ranks on, if that isn't all of a node's."""
    usual_devices: PositiveInt | None = None
    """GPUs that `init` suggests, if that isn't all of a host's."""
    mesh: bool = False
    gemm_bf16: PositiveFloat
    gemm_fp8: PositiveFloat
    gemm_fp8_rowwise: PositiveFloat
    gemm_ramp: NonNegativeFloat
    gemm_start: NonNegativeFloat
    gemm_split: PositiveFloat
    gemm_grouped: PositiveFloat
    attention: PositiveFloat
    attention_cudnn: PositiveFloat
    attention_backward: PositiveFloat
    ring_attention: PositiveFloat
    eager: PositiveFloat
    async_tp: NonNegativeFloat
    link_efficiency: PositiveFloat
    memory_efficiency: PositiveFloat
    network_efficiency: PositiveFloat
    overlap_slowdown: NonNegativeFloat
    node_variation: NonNegativeFloat
    collective: NonNegativeFloat
    host_launch: NonNegativeFloat
    step_overhead: NonNegativeFloat
    host_link: PositiveFloat
    reserve_gib: NonNegativeFloat
    fitted: bool = False
    measured: bool = False
    """Whether plans are held against published runs on it, or its rates were measured."""
    measured_experts: bool = False
    """Likewise, of mixtures of experts in this project's software."""

    @property
    def accelerator(self) -> Accelerator:
        """Facts that the trainer would ask the device for."""
        if self.device == "cpu":
            return Accelerator("a CPU", (0, 0))
        return Accelerator(
            self.device_names[0] if self.device_names else self.name, self.capability
        )

    def check_ranks(self, world: int) -> None:
        """Check that the hardware has the rates at which `world` ranks communicate.

        Raises:
            ConfigError: a rate is infinite.
        """
        requirements = {
            "link": ("between the GPUs of a node", world > 1 and self.gpus_per_node > 1),
            "network": ("between nodes", world > self.gpus_per_node),
        }
        problems = [
            f"--hardware: {self.name} has no {key}, the bytes/s of a GPU {where}, which "
            f"{world} ranks need; set it in a hardware file, or plan one rank"
            for key, (where, applies) in requirements.items()
            if applies and math.isinf(getattr(self, key))
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def devices_per_host(self) -> int:
        """Number of devices on which one launcher starts ranks."""
        return self.gpus_per_host or self.gpus_per_node

    @property
    def usable_gib(self) -> float:
        """Memory left for the allocator."""
        return self.memory_gib - self.reserve_gib

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth that large kernels reach."""
        return self.memory_bandwidth * self.memory_efficiency

    def product_seconds(
        self, rows: float, columns: float, inner: float, rate: float, products: int = 1
    ) -> float:
        """Seconds of `products` equal matrix products, which sum over `inner` terms.

        They take waves of `gemm_ramp` elements, one more than their results fill, and each wave
        `gemm_start` beside its sums.

        Args:
            rate: FLOP/s that large ones reach.
        """
        result = products * rows * columns
        waves = 1 + result / self.gemm_ramp if self.gemm_ramp else 0.0
        idle = self.gemm_ramp * min(inner, self.gemm_split)
        return 2 * (result * inner + idle) / rate + waves * self.gemm_start

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes/s per rank of a ring over `ranks` ranks that are `stride` ranks apart.

        A ring runs at the speed of its slowest hop: the link within a node; between nodes the
        network ports of the ranks that a node has in the ring, since a ring enters and leaves each
        node once.
        """
        link = self.link * self.link_efficiency
        # each GPU's links are shared out among the others: a ring over some of them uses those
        # alone
        if self.mesh:
            inside = min(max(1, self.gpus_per_node // stride), ranks)
            link *= max(1, inside - 1) / (self.gpus_per_node - 1)
        if ranks * stride <= self.gpus_per_node:
            return link
        inside = max(1, self.gpus_per_node // stride)
        return min(link, self.network * self.network_efficiency * min(inside, ranks))

    def exchange(self, size: float, ranks: int) -> float:
        """Seconds of an all-to-all among adjacent ranks, each sending `size` bytes in equal parts.

        Bytes that stay within the node use the link; the others, at the same time, the rank's own
        network port.
        """
        inside = min(ranks, self.gpus_per_node)
        link = size * (inside - 1) / ranks / (self.link * self.link_efficiency)
        network = size * (ranks - inside) / ranks / (self.network * self.network_efficiency)
        return max(link, network) + self.collective


@cache
def load_hardware(path: Path = FILE) -> dict[str, Hardware]:
    """All hardware in a file, by name.

    Raises:
        ConfigError: the file can't be read, or a table is incomplete or invalid.
    """
    try:
        tables = tomli.loads(text_of(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [f"--hardware: can't read {path}: {getattr(error, 'strerror', None) or error}"]
        ) from None
    if keys := [name for name, value in tables.items() if not isinstance(value, dict)]:
        raise ConfigError(
            [f"--hardware: {path} is not a hardware file: {keys[0]} is a key outside of any table"]
        )
    shared = tomli.loads(FILE.read_text(encoding="utf-8"))["shared"] | tables.pop("shared", {})
    tables.pop("peak_bf16", None)
    hardware = {}
    problems = []
    for name, table in tables.items():
        values = {"name": name} | shared | table
        try:
            hardware[name] = Hardware.model_validate(values)
        except ValidationError as error:
            problems += [
                f"{path}: {name}.{e['loc'][0]}: {e['msg'][0].lower()}{e['msg'][1:]}"
                for e in error.errors()
            ]
    if problems:
        raise ConfigError(problems)
    return hardware


def hardware_with(device: str) -> Hardware | None:
    """The built-in hardware whose device torch reports by this name."""
    return next(
        (hardware for hardware in load_hardware().values() if device in hardware.device_names), None
    )


def find_hardware(name: str) -> Hardware:
    """The built-in hardware called `name`, or the first in the TOML file `name`.

    Raises:
        ConfigError: there is none.
    """
    if name.endswith(".toml"):
        tables = load_hardware(Path(name))
        if not tables:
            raise ConfigError([f"--hardware: {name} describes no hardware"])
        return next(iter(tables.values()))
    by_name = load_hardware()
    if re.match("mps|xpu|tpu|apple|mac|m[1-9]", name.lower()):
        raise ConfigError(
            [
                f"--hardware: {name} is not supported, only GPUs of NVIDIA and AMD are; "
                "`--hardware cpu` computes on this machine's CPU"
            ]
        )
    if name not in by_name:
        matches = [other for other in by_name if other.startswith(name.lower())]
        hint = (
            f"; did you mean {' or '.join(matches)}?"
            if name and matches
            else did_you_mean(name.lower(), by_name)
        )
        raise ConfigError(
            [
                f"--hardware: no hardware {name!r} (there is {', '.join(by_name)}, or a "
                f"TOML file){hint}"
            ]
        )
    return by_name[name]
