"""The device a rank computes on: CUDA if available, else the CPU."""

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path

import torch

from torchtitan.utils.accelerators import refuse_unusable

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3


def device_type() -> str:
    """`cuda` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_ranks() -> int:
    """Number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def current_device() -> torch.device:
    """This rank's device. On CUDA, also makes it the current device.

    Raises:
        ConfigError: torch can't use this machine's GPUs, and the CPU wasn't asked for.
    """
    refuse_unusable(local_ranks())
    if device_type() == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def device_name() -> str:
    """The vendor's name of the device, or `cpu`."""
    return torch.cuda.get_device_name() if device_type() == "cuda" else "cpu"


def copy_to(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor on `device`. It is copied through page-locked memory, since the host
    waits for copies from pageable memory.
    """
    if device.type != "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def usual_dtype(device: torch.device) -> str:
    """`bfloat16`, or `float32` on a CPU and on NVIDIA's GPUs before Ampere, which emulate it."""
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bfloat16" if native else "float32"


def peak_memory() -> tuple[float, float]:
    """Peak memory since the last call as (GiB, percent of the device's memory).

    On CUDA: reserved by the caching allocator. On the CPU: current resident set size of this
    process.
    """
    if device_type() == "cuda":
        reserved = torch.cuda.max_memory_reserved()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.reset_peak_memory_stats()
    else:
        import psutil

        reserved = psutil.Process().memory_info().rss
        total = psutil.virtual_memory().total
    return reserved / 2**30, 100 * reserved / total


def gpu_sensors() -> dict[str, float]:
    """Utilization, power and temperature of this rank's GPU; empty without NVML's package."""
    values = {}
    if device_type() == "cuda":
        for name, read, unit in (
            ("gpu_utilization_pct", torch.cuda.utilization, 1),
            ("gpu_power_w", torch.cuda.power_draw, 1000),
            ("gpu_temperature_c", torch.cuda.temperature, 1),
        ):
            with suppress(Exception):  # NVML's own errors, such as of a sensor that the GPU lacks
                values[name] = read() / unit
    return values


def free_memory(device: torch.device, limits: Path = Path("/sys/fs/cgroup")) -> float:
    """Free memory in GiB of a GPU, beyond what the allocator has reserved; or this rank's share of
    this machine's, or of the container's if it has less.
    """
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    import psutil

    free = psutil.virtual_memory().available
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        # Neither file exists outside of control groups; "max" is no limit.
        with suppress(OSError, ValueError):
            free = min(free, int((limits / limit).read_text()) - int((limits / usage).read_text()))
    return free / 2**30 / local_ranks()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on CUDA or on the CPU."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or "DefaultCPUAllocator" in str(error)


def seconds_of_matmuls() -> float:
    """Seconds for a few matrix products, which measure this rank's speed alone."""
    on_cuda = device_type() == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_cuda else (512, torch.float32)
    a = torch.ones(size, size, dtype=dtype, device=device_type())
    if on_cuda:
        torch.cuda.synchronize()  # exclude earlier work
    start = time.perf_counter()
    for _ in range(4):
        a @ a
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def device_syncs(report: bool) -> Iterator[None]:
    """Within, warn of every operation that makes the host wait for the device, or never warn."""
    # Setting the mode warns, too.
    if device_type() == "cpu" or not (report or torch.cuda.get_sync_debug_mode()):
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn" if report else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class LateValues:
    """Values that the host reads without waiting for what the device was given to do after them."""

    def __init__(
        self, values: torch.Tensor, done: torch.distributed.Work | torch.cuda.Event | None = None
    ):
        """
        Args:
            values: a vector.
            done: a collective in flight that changes it.
        """
        self._values = values
        self._done = done
        if done is None and values.is_cuda:
            self._done = torch.cuda.current_stream(values.device).record_event()

    @cached_property
    def numbers(self) -> list[float]:
        """The values, for which the host waits the first time."""
        with device_syncs(report=False), torch.cuda.stream(_reading_stream(self._values.device)):
            if self._done:
                self._done.wait()  # this stream waits
            return self._values.tolist()


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def fastest(work: Callable[[], object], seconds: float = 0.0) -> float:
    """Seconds of the fastest call, since other processes may use the CPU.

    Args:
        seconds: time for which to repeat it, at least three times.
    """
    work()  # sets up
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def cpu_product_rate(dtype: str, size: int = 256, seconds: float = 0.0) -> float:
    """FLOP/s of a square matrix product on the CPU, measured as by `fastest`."""
    a = torch.ones(size, size, dtype=getattr(torch, dtype))
    return 2 * size**3 / fastest(lambda: a @ a, seconds)


def describe_cpu_precision(dtype: str) -> str | None:
    """A sentence for the log about the speed of `dtype` on this CPU, measured by products; None for
    fp32.
    """
    if dtype == "float32":
        return None
    gain = cpu_product_rate(dtype) / cpu_product_rate("float32")
    if gain >= 1:
        return f"Computing in {dtype}: products are {gain:.1f} times as fast as in float32"
    return (
        f"Computing in {dtype}: products take {1 / gain:.1f} times as long as in float32; "
        'set training.mixed_precision_param = "float32"'
    )


def tune_cpu() -> None:
    """Give a CPU rank its share of the cores, and make glibc keep freed memory; a no-op on CUDA.

    `OMP_NUM_THREADS` takes precedence. By default glibc returns large tensors to the kernel, which
    zeroes them again, page by page, in every step.
    """
    if device_type() != "cpu":
        return
    if "OMP_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks()))
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
