"""One fake GPU in this process: import it before torch, and end the process afterwards.

`TORCHTITAN_TEST_SM=100` makes it a B200; otherwise it is an H100.
"""

import contextlib
import os
from types import SimpleNamespace
from typing import Any

from tests.cuda import shim

_module = shim.load()

import torch  # noqa: E402 (after the module)

SM = int(os.environ.get("TORCHTITAN_TEST_SM", "90"))
"""Compute capability without its dot."""
DEVICE = torch.device("cuda", 0)
SHARED_MEMORY = 227 * 1024
"""Bytes that a block of threads may have, on both chips."""
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3" if SM == 90 else "NVIDIA B200",
    major=SM // 10,
    minor=SM % 10,
    multi_processor_count=132 if SM == 90 else 148,
    total_memory=(80 if SM == 90 else 180) << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=50 << 20,
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
    _module.install_guard()
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
