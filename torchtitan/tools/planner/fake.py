"""One rank of a simulated cluster: collectives that return at once, and tensors without memory.

PyTorch's `fake` backend replaces the network and `FakeTensorMode` the device. Tensors are nominally
on the CPU, since autograd needs a device that this build of torch supports; what CUDA does
differently is substituted here.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules, stage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan.models import attention_backend, norms
from torchtitan.optim.loss import cross_entropy
from torchtitan.parallel import mesh as meshes
from torchtitan.parallel.collectives import local, sharded_like
from torchtitan.tools.planner.substitution import Substitution, substituted
from torchtitan.tools.planner.tracer import Tracer


@contextmanager
def fake_cluster(world: int, rank: int) -> Iterator[FakeTensorMode]:
    """Make this process `rank` of a fake default process group of `world` ranks."""
    assert not dist.is_initialized(), "a trace creates its own process group"
    with no_network() as mode:
        start_group(world, rank)
        try:
            yield mode
        finally:
            dist.destroy_process_group()


def start_group(world: int, rank: int) -> None:
    """Initialize a fake default process group."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


@contextmanager
def no_network() -> Iterator[FakeTensorMode]:
    """Substitutions under which a rank of this project runs on a fake process group."""
    known = set(meshes._meshes)
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    # DTensor runs each operation on fake tensors of global shape, which no rank ever holds.
    substitutions = [
        Substitution(ShardingPropagator, "_propagate_tensor_meta_non_cached", aside(propagate))
    ]
    schedule = schedules._PipelineSchedule
    if hasattr(schedule, "_warmup_p2p"):  # torch 2.12 to 2.14: ranks exchange shapes first
        substitutions.append(Substitution(schedule, "_warmup_p2p", _shapes_are_known))
    with substituted(*substitutions):
        try:
            yield FakeTensorMode(allow_non_fake_inputs=True)
        finally:
            for key in set(meshes._meshes) - known:
                del meshes._meshes[key]


def aside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` outside of fake mode."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


def _shapes_are_known(schedule: Any, stages: Any, *_: Any) -> None:
    for each in stages:
        each._inference_mode = stage.InferenceMode.STATIC


def take_fake_memory(
    mode: FakeTensorMode, model: nn.Module, device: str | torch.device = "cpu"
) -> None:
    """Move a sharded model from the meta device to fake tensors, nominally on `device`."""
    with mode:
        for name, param in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            memory = torch.empty_like(local(param), device=device)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(sharded_like(memory, param)))
        for name, buffer in list(model.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.empty_like(buffer, device=device))


# ---- what differs on CUDA


class _Stream:
    """Replaces `torch.cuda.Stream` with a name, by which the tracer attributes allocations."""

    def __init__(self, tracer: Tracer, name: str):
        self.tracer = tracer
        self.name = name

    def __enter__(self) -> None:
        self.outside = self.tracer.stream
        self.tracer.stream = self.name

    def __exit__(self, *error: Any) -> None:
        self.tracer.stream = self.outside

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return _Event()


class _Event:
    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@contextmanager
def recording(tracer: Tracer, *, cuda: bool) -> Iterator[None]:
    """Record in `tracer` what happens inside the context.

    Args:
        cuda: behave as on CUDA: streams of their own, fused RMSNorm.
    """
    resize = torch.UntypedStorage.resize_

    def seen(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        tracer.resized(storage, int(size))
        return out

    substitutions = [Substitution(torch.UntypedStorage, "resize_", seen)]
    if cuda:
        substitutions += _cuda(tracer)
    with substituted(*substitutions), tracer:
        gc.disable()  # as in training; a collection would free what training keeps
        try:
            yield
        finally:
            gc.enable()


def _cuda(tracer: Tracer) -> Iterator[Substitution]:
    """What CUDA does differently from the CPU, on which fake tensors nominally are."""
    numbers = iter(range(1, 1000))
    streams: dict[str, Any] = {
        "Stream": lambda *args, **kwargs: _Stream(tracer, f"stream {next(numbers)}"),
        "current_stream": lambda *args: _Stream(tracer, tracer.stream),
        "stream": lambda stream: stream or nullcontext(),
        "Event": _Event,
    }
    for name, replacement in streams.items():
        yield Substitution(torch.cpu, name, replacement)
    yield Substitution(F, "rms_norm", _rms_norm)
    # What the CPU does in its own way.
    yield Substitution(norms.RMSNorm, "forward", nn.RMSNorm.forward)
    yield Substitution(attention_backend, "_gains_on_cpu", lambda q, mask: False)


class _RMSNorm(torch.autograd.Function):
    """Memory footprint of CUDA's fused kernel; the CPU has none and keeps intermediate results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float | None = None) -> Tensor:
    if not isinstance(x, DTensor):
        return _RMSNorm.apply(x, weight)
    assert isinstance(weight, DTensor)
    out = _RMSNorm.apply(x.to_local(), weight.to_local())
    return sharded_like(out, x)


class _FusedLoss(torch.autograd.Function):
    """Has the memory footprint of the compiled loss: no fp32 copy of the logits, their gradient in
    their own type.

    What inductor makes of logits that are sharded over the vocabulary ends a kernel at each
    all-reduce, and holds two fp32 copies between them: one for the backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, sharded: bool) -> Tensor:
        ctx.dtype = logits.dtype
        if sharded:
            kept = logits.new_empty(logits.shape, dtype=torch.float32)
            torch.empty_like(kept)
        else:
            kept = logits
        ctx.save_for_backward(kept, labels, logits.new_empty(labels.shape, dtype=torch.float32))
        return logits.new_empty(len(labels), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.empty_like(ctx.saved_tensors[0], dtype=ctx.dtype), None, None


def fused_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The memory footprint of a compiled `cross_entropy`, without its value."""
    if isinstance(logits, DTensor):
        group = logits.device_mesh.get_group()
        for _ in range(2):  # each token's largest logit, and its sum of exponentials
            dist.all_reduce(torch.empty(labels.shape, dtype=torch.float32), group=group)
        return _FusedLoss.apply(logits.to_local(), labels, True)
    return _FusedLoss.apply(logits, labels, False)


LOSSES = {False: cross_entropy, True: fused_cross_entropy}
"""Cross-entropy by whether it is compiled."""
