"""torch.compile for the fake GPU: inductor's Triton kernels become machine code, which nothing
loads. A compiled region then runs as its graph, on fake tensors.
"""

import copy
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, MockTensor

from tests.cuda import gpu

_PACKAGE = str(Path(__file__).parents[2] / "torchtitan") + os.sep
_EXTERN = re.compile(r"extern_kernels\.(\w+)\(|torch\.ops\.([\w.]+)\(")

_LAUNCH = re.compile(r"^\s+triton_\w+\.run\(", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    name: str
    sm: int
    bytes: int
    """Size of the machine code."""
    shared: int
    """Bytes of shared memory."""


@dataclass
class Region:
    """One compiled graph."""

    id: str
    """Shared by a forward and its backward."""
    name: str
    """File and function of its outermost line."""
    kind: str
    """`forward`, `backward`, or `inference`."""
    operations: int
    kernels: int
    """Launches of Triton's kernels."""
    extern: dict[str, int]
    """Calls of kernels that aren't Triton's."""
    on_cpu: bool
    """Whether some of it is C++ for the CPU."""


@dataclass
class Compiled:
    """What has been compiled so far."""

    regions: list[Region] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


class _Driver:
    """Triton's view of the GPU."""

    launcher_cls = None

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": gpu.SHARED_MEMORY,
                "max_num_regs": 65536,
                "multiprocessor_count": gpu.PROPERTIES.multi_processor_count,
                "warpSize": 32,
            }

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", gpu.SM, 32)

    def get_active_torch_device(self) -> torch.device:
        return gpu.DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def is_active(self) -> bool:
        return True


def install() -> Compiled:
    """Compile for the fake GPU from now on, in this process."""
    compiled = Compiled()
    triton.runtime.driver.set_active(_Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    settings = {
        "compile_threads": 1,  # other processes have no fake GPU
        "force_disable_caches": True,
        "joint_graph_constant_folding": False,  # computes on the device
        "use_static_cuda_launcher": False,
        "use_static_triton_launcher": False,
    }
    for name, value in settings.items():
        if hasattr(inductor_config, name):
            setattr(inductor_config, name, value)
    # Patterns that are traced on the device; what they would replace, torch's attention, is absent.
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = lambda *args: None
    misc_patterns._misc_patterns_init = lambda *args: None
    triton_heuristics.CachingAutotuner.precompile = functools.partialmethod(_precompile, compiled)
    _install_launches(compiled)
    names: dict[Any, str] = {}
    compile_fx.compile_fx = functools.partial(
        compile_fx.compile_fx,
        inner_compile=functools.partial(
            _compile_graph, compile_fx.compile_fx_inner, compiled, names
        ),
    )
    return compiled


def _install_launches(compiled: Compiled) -> None:
    """Kernels that the project and torchao wrote in Triton: a launch on fake tensors compiles."""
    run, tune = JITFunction.run, Autotuner.run
    seen: set[str] = set()

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        fake = [MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
        named = {
            name: MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x
            for name, x in kwargs.items()
        }
        kernel = run(function, *fake, grid=grid, warmup=True, **named)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            compiled.kernels.append(_kernel(function.__name__, kernel))
        return kernel

    def tune_nothing(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
        autotuner.configs = autotuner.configs[:1]
        return tune(autotuner, *args, **kwargs)

    JITFunction.run, Autotuner.run = compile_only, tune_nothing


def _precompile(autotuner: Any, compiled: Compiled, *args: Any, **kwargs: Any) -> None:
    """Compile a kernel in its first configuration only, and load none."""
    with autotuner.lock:
        if autotuner.compile_results:
            return
        autotuner.configs = autotuner.configs[:1]
        autotuner._precompile_worker()
        name = autotuner.inductor_meta.get("kernel_name", "")
        for result in autotuner.compile_results:
            compiled.kernels.append(_kernel(name, result.kernel))


def _kernel(name: str, kernel: Any) -> Kernel:
    metadata = kernel.metadata
    return Kernel(name, metadata.target.arch, len(kernel.asm.get("cubin", b"")), metadata.shared)


def _compile_graph(
    compile_inner: Callable[..., Any],
    compiled: Compiled,
    names: dict[Any, str],
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    **kwargs: Any,
) -> Callable[[list[Any]], Any]:
    """Compile a graph and record it. Returns a function that runs the graph instead."""
    # Not a copy of the module, whose constants may be fake.
    graph = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    operations = sum(node.op == "call_function" for node in module.graph.nodes)
    compile_id = torch._guards.CompileContext.current_compile_id()
    name = names.setdefault(compile_id, _name(module.graph))
    out = compile_inner(module, inputs, **kwargs)
    source = getattr(out, "source_code", None) or ""
    calls = _EXTERN.findall(source)
    kind = "forward"
    if kwargs.get("is_backward"):
        kind = "backward"
    elif kwargs.get("is_inference"):
        kind = "inference"
    compiled.regions.append(
        Region(
            id=str(compile_id),
            name=name,
            kind=kind,
            operations=operations,
            kernels=len(_LAUNCH.findall(source)),
            extern=dict(Counter(a or b.removesuffix(".default") for a, b in calls)),
            on_cpu="cpp_fused" in source,
        )
    )

    def run(arguments: list[Any]) -> Any:
        return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _name(graph: torch.fx.Graph) -> str:
    """File and function of the outermost line of the project in a forward's graph."""
    for node in graph.nodes:
        for file, function in re.findall(
            r'File "([^"]+)", line \d+, in (\w+)', node.stack_trace or ""
        ):
            if file.startswith(_PACKAGE):
                return f"{file.removeprefix(_PACKAGE)}:{function}"
    return "?"
