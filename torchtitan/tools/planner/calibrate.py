"""Measure this machine's rates for a hardware file.

One device's matrix products by type, causal attention and memory bandwidth are measured, at the
sizes of a training step. Under torchrun, so are the collectives among the ranks of a node, and
between nodes. What a start can't measure comes from the data sheet of a known device, or is left to
be filled in.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.tools.planner.hardware import Hardware, load_hardware, load_shared
from torchtitan.utils.device import current_device
from torchtitan.utils.distributed_compat import run_gloo_in_order
from torchtitan.utils.process import rank_and_world
from torchtitan.utils.torch_compat import silence_false_alarms

_SECONDS = 1.0
"""Duration of each measurement, after a first call."""
_TIMEOUT = timedelta(minutes=10)
_CPU = (
    "reserve_gib = 1.0  # an estimate",
    "eager = 1.5  # an estimate",
    "gemm_ramp = 0.0  # included in what was measured",
    "gemm_depth = 0.0",
)
"""Constants of a CPU that differ from the shared ones."""


@dataclass(frozen=True)
class Links:
    """Bytes/s per rank of an all-gather: those that it receives over the seconds that it takes.
    None: not measured.
    """

    link: float | None
    """Among the ranks of a node."""
    network: float | None
    """Among one rank of each node."""
    ranks_per_node: int


def calibrate() -> str | None:
    """The text of a hardware file for this machine; None on all ranks but the first."""
    silence_false_alarms()
    run_gloo_in_order()
    rank, world = rank_and_world()
    device = current_device()
    links = Links(None, None, max(1, torch.cuda.device_count()))
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        try:
            links = measure_links(
                device, ranks_per_node(), 2**30 if device.type == "cuda" else 2**26
            )
            # The others wait, so that they don't slow down what is measured next.
            text = _describe(device, links) if rank == 0 else None
            dist.barrier()
        finally:
            dist.destroy_process_group()
        return text
    return _describe(device, links)


def describe_cpu() -> str:
    """The text of a hardware file for one rank on this machine's CPU, whatever GPUs it has."""
    return _describe(torch.device("cpu"), Links(None, None, 1))


def _describe(device: torch.device, links: Links) -> str:
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU"
    known = next((hw for hw in load_hardware().values() if name in hw.device_names), None)
    size = 8192 if cuda else 1024
    bf16, fp32 = (_matmul(size, device, dtype) for dtype in (torch.bfloat16, torch.float32))
    fp8 = (
        _matmul_fp8(size, device) if cuda and torch.cuda.get_device_capability() >= (8, 9) else 0.0
    )
    if cuda:  # the rate of large products, to which a plan adds what smaller ones cost
        bf16, fp32, fp8 = (
            rate * _shortfall(size, bits) for rate, bits in ((bf16, 16), (fp32, 32), (fp8, 8))
        )
    dtype = torch.bfloat16 if cuda else torch.float32  # what training would use
    attention = _attention(8192 if cuda else 512, device, dtype)
    memory = _copy(2**30 if cuda else 2**27, device)
    peaks = (
        {"bf16": known.bf16, "fp8": known.fp8, "fp32": known.fp32}
        if known
        else {"bf16": bf16, "fp8": fp8, "fp32": fp32}
    )
    base = peaks["bf16"] if cuda else peaks["fp32"]
    return "\n".join(
        [
            "# Measured by torchtitan plan --calibrate.",
            "[this-machine]",
            f'description = "{name}, measured"',
            *([f'device_names = ["{name}"]'] if cuda else []),
            f'device = "{device.type}"',
            *([f"capability = {list(torch.cuda.get_device_capability())}"] if cuda else []),
            f"memory_gib = {_memory_gib(cuda):.1f}",
            *(
                f"{key} = {value:.4g}  # {'data sheet' if known else 'measured'}"
                for key, value in peaks.items()
            ),
            f"gemm_bf16 = {bf16 / peaks['bf16']:.3f}  # measured",
            f"gemm_fp8 = {fp8 / peaks['fp8'] if fp8 and peaks['fp8'] else 1.0:.3f}  # "
            "measured, if the device has it",
            f"attention = {attention / base:.3f}  # measured, forward",
            f"memory_bandwidth = {known.memory_bandwidth if known else memory:.4g}",
            "memory_efficiency = "
            f"{memory / known.memory_bandwidth if known else 1.0:.3f}  # measured",
            "gpus_per_node = "
            f"{known.gpus_per_node if known and not links.link else links.ranks_per_node}",
            *_rates(links, known),
            *(() if cuda else _CPU),
            "",
        ]
    )


def _rates(links: Links, known: Hardware | None) -> Iterator[str]:
    """The rates between devices: measured, else those of the data sheet, else to be filled in."""
    for key, measured, start in (
        ("link", links.link, "several ranks of a node"),
        ("network", links.network, "ranks of several nodes"),
    ):
        if known:
            sheet: float = getattr(known, key)
            yield f"{key} = {sheet:.4g}  # data sheet"
            if measured:
                yield f"{key}_efficiency = {measured / sheet:.3f}  # measured"
            else:
                yield (
                    f"# {key}_efficiency is the default: to measure it, start {start} by torchrun."
                )
        elif measured:
            yield f"{key} = {measured:.4g}  # measured"
            yield f"{key}_efficiency = 1.0  # included"
        else:
            yield (
                f"# {key} =   # bytes/s per GPU: could not be measured. Start {start} by "
                "torchrun, or fill it in."
            )


def unmeasured(text: str) -> list[str]:
    """The rates of a hardware file that are to be filled in."""
    return [key for key in ("link", "network") if f"# {key} = " in text]


def _memory_gib(cuda: bool) -> float:
    if cuda:
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    import psutil

    return psutil.virtual_memory().total / 2**30


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, in the fastest round, since other processes may use the machine."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    best = float("inf")
    until = time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        begin = time.perf_counter()
        for _ in range(4):
            work()
        wait()
        best = min(best, (time.perf_counter() - begin) / 4)
    return best


def _matmul(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _matmul_fp8(size: int, device: torch.device) -> float:
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    scaled = torch._scaled_mm
    return (
        2 * size**3 / _seconds(lambda: scaled(a, a.t(), one, one, out_dtype=torch.bfloat16), device)
    )


def _shortfall(size: int, bits: int) -> float:
    """How much faster than this square product the performance model holds large ones to be."""
    shared = load_shared()
    return (1 + shared["gemm_ramp"] / size**2) * (1 + shared["gemm_depth"] * 16 / bits / size)


def _attention(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention's forward; only the unmasked half counts."""
    q = torch.randn(1, 16, size, 64 if device.type == "cpu" else 128, device=device).to(dtype)
    flops = 2 * size**2 * q.shape[1] * q.shape[3]
    return flops / _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), device)


def _copy(size: int, device: torch.device) -> float:
    """Bytes/s that a copy reads and writes in total."""
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / _seconds(lambda: b.copy_(a), device)


# ---- links

_ROUNDS = 5
"""Collectives of which the fastest counts, after a first one that sets up connections."""


def ranks_per_node() -> int:
    """Ranks that torchrun started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def measure_links(device: torch.device, per_node: int, size: int) -> Links:
    """Measure all-gathers, on all ranks of the default process group at once.

    Args:
        per_node: ranks of each node.
        size: bytes that a collective gathers.
    """
    world = dist.get_world_size()
    rank = dist.get_rank()
    link = network = None
    if per_node > 1:
        nodes = [list(range(first, first + per_node)) for first in range(0, world, per_node)]
        link = _gathered(nodes, rank, device, size)
    if world > per_node:
        network = _gathered([list(range(0, world, per_node))], rank, device, size)
    return Links(link, network, per_node)


def _gathered(groups: list[list[int]], rank: int, device: torch.device, size: int) -> float:
    """Rate of the slowest group; the groups gather at the same time, as FSDP's do."""
    made = [dist.new_group(members) for members in groups]
    seconds = 0.0
    for members, group in zip(groups, made, strict=True):
        if rank in members:
            seconds = _gather_seconds(group, len(members), device, size)
    n = len(groups[0])
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    for group in made:
        dist.destroy_process_group(group)
    return size * (n - 1) / n / slowest.item()


def _gather_seconds(group: dist.ProcessGroup, ranks: int, device: torch.device, size: int) -> float:
    own = torch.empty(size // ranks, dtype=torch.uint8, device=device)
    whole = torch.empty(size // ranks * ranks, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        dist.all_gather_into_tensor(whole, own, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
