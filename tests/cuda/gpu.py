"""One fake GPU in this process: import it before torch, and end the process afterwards.

`TORCHTITAN_TEST_SM=120` makes it an RTX 5090; otherwise it is an H100.
"""

import contextlib
import os
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.cuda import shim

_module = shim.load()

import torch  # noqa: E402 (after the module)


class _Chip(NamedTuple):
    name: str
    multiprocessors: int
    memory_gib: int
    l2_mib: int
    threads: int
    """Of a multiprocessor."""
    shared_kib: int
    """Of a block of threads; a multiprocessor has one more."""


_CHIPS = {
    89: _Chip("NVIDIA GeForce RTX 4090", 128, 24, 72, 1536, 99),
    90: _Chip("NVIDIA H100 80GB HBM3", 132, 80, 50, 2048, 227),
    100: _Chip("NVIDIA B200", 148, 180, 126, 2048, 227),
    120: _Chip("NVIDIA GeForce RTX 5090", 170, 32, 96, 1536, 99),
}
SM = int(os.environ.get("TORCHTITAN_TEST_SM", "90"))
"""Compute capability without its dot."""
_CHIP = _CHIPS[SM]
DEVICE = torch.device("cuda", 0)
SHARED_MEMORY = _CHIP.shared_kib << 10
"""Bytes that a block of threads may have."""
PROPERTIES = SimpleNamespace(
    name=_CHIP.name,
    major=SM // 10,
    minor=SM % 10,
    multi_processor_count=_CHIP.multiprocessors,
    total_memory=_CHIP.memory_gib << 30,
    warp_size=32,
    max_threads_per_multi_processor=_CHIP.threads,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=SHARED_MEMORY + 1024,
    L2_cache_size=_CHIP.l2_mib << 20,
    uuid="0",
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
)


class _Stream:
    device = DEVICE
    device_index = cuda_stream = stream_id = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Generator(torch.Generator):
    """The GPU's generator, whose state doesn't exist."""

    device = DEVICE

    def clone_state(self) -> "_Generator":
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Any) -> "_Generator":
        return self

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...

    def register_graph(self, *args: Any) -> None: ...


def _install() -> None:
    p = PROPERTIES
    _module.install(
        p.name,
        p.major,
        p.minor,
        p.multi_processor_count,
        p.total_memory,
        p.L2_cache_size,
        p.max_threads_per_multi_processor,
        SHARED_MEMORY,
    )
    # The backward's thread of a device would select it.
    torch.autograd.set_multithreading_enabled(False)
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None
    torch._subclasses.FakeTensorMode.avoid_device_init = True  # compute no constants on it
    torch.backends.cudnn.version = lambda: 91900
    torch.Tensor.record_stream = lambda tensor, stream: None
    no_state = torch.zeros(16, dtype=torch.uint8)
    functions = {
        "_lazy_init": None,
        "set_device": None,
        "synchronize": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "set_rng_state": None,
        "reset_peak_memory_stats": None,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "current_device": 0,
        "device_count": 1,
        "get_sync_debug_mode": 0,
        "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "mem_get_info": (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "max_memory_reserved": 0,
        "get_rng_state": no_state,
    }
    for name, answer in functions.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: _Stream()
    torch.cuda.stream = torch.cuda.device = lambda *args: contextlib.nullcontext()
    torch.cuda.default_generators = (_Generator(),)


_install()
