"""What a step does differently on CUDA, patched in while a fake step on the CPU is traced."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.traced_step.tracer import Tracer
from torchtitan.models.attention import backend as attention_backend
from torchtitan.models.layers import norms
from torchtitan.optim.loss import cross_entropy
from torchtitan.parallel.collectives import sharded_like


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
    with ExitStack() as stack:
        resize = torch.UntypedStorage.resize_

        def seen(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            tracer.resized(storage, int(size))
            return out

        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", seen))
        if cuda:
            numbers = iter(range(1, 1000))
            stack.enter_context(
                patch.multiple(
                    torch.cpu,
                    Stream=lambda *args, **kwargs: _Stream(tracer, f"stream {next(numbers)}"),
                    current_stream=lambda *args: _Stream(tracer, tracer.stream),
                    stream=lambda stream: stream or nullcontext(),
                    Event=_Event,
                    create=True,
                )
            )
            stack.enter_context(patch.object(F, "rms_norm", _rms_norm))
            # What the CPU does in its own way, since fake tensors are on it.
            stack.enter_context(patch.object(norms.RMSNorm, "forward", nn.RMSNorm.forward))
            stack.enter_context(patch.object(attention_backend, "_gains_in_fp32", lambda q: False))
        stack.enter_context(tracer)
        gc.disable()  # as in training; a collection would free what training keeps
        stack.callback(gc.enable)
        yield


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
