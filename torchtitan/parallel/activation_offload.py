"""Activation offload: what a block keeps for its backward waits in host memory, copied while other
blocks compute.

torch's `saved_tensors_hooks` see everything that autograd keeps: of a compiled block too, and of a
checkpointed block its inputs. Copies to the host run on a stream of their own, beside the forward.
Those back start when the backward reaches the next block, one block ahead of their use.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from torchtitan.config.derive import offloaded_blocks
from torchtitan.config.sections.parallelism import ActivationCheckpoint

SMALL = 2**12
"""Bytes below which a tensor stays on the device: copying it costs more than it frees."""


def apply_activation_offload(model: nn.Module, ac: ActivationCheckpoint) -> "Offload":
    """Offload what the first `ac.offload_blocks` blocks of `model` keep for their backward, in
    place.

    Must come after checkpointing and compilation, whose results are what is kept, and before FSDP,
    which gathers the weights around `forward`.
    """
    offload = Offload()
    count = offloaded_blocks(ac, len(model.layers))
    if count == 0:
        return offload
    # The block behind them only says when the last of their copies is needed.
    for index, block in enumerate([*model.layers.values()][: count + 1]):
        forward = offload.wrap(block.forward.__func__, first=index == 0, away=index < count)
        block.forward = MethodType(forward, block)
    return offload


class Offload:
    """The host copies of a model's blocks."""

    def __init__(self) -> None:
        self.moved = 0
        """Bytes copied to the host so far."""
        self._previous: _Visit | None = None
        """Of the block before, in the forward that runs."""
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def wrap(self, forward: Callable[..., Any], *, first: bool, away: bool) -> Callable[..., Any]:
        """A block's `forward`.

        Args:
            first: the block is the model's first.
            away: it keeps in host memory what its backward needs.
        """

        def offloading_forward(block: nn.Module, x: Tensor, *shared: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(block, x, *shared)
            previous = None if first else self._previous
            self._previous = visit = _Visit(self, [*block.parameters(), *block.buffers(), *shared])
            with saved_tensors_hooks(visit.pack, _Saved.unpack) if away else nullcontext():
                out = forward(block, x, *shared)
            visit.inputs.clear()
            hidden = (
                out[0] if isinstance(out, tuple) else out
            )  # a mixture of experts also returns its load
            if previous is not None and hidden.requires_grad:
                hidden.register_hook(lambda _: previous.fetch())
            return out

        return offloading_forward

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
        """To the host and from it; None where copies don't run beside computation."""
        if device.type == "cuda" and self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams


class _Visit:
    """One forward of one block."""

    def __init__(self, offload: Offload, stay: Iterable[Any]):
        """
        Args:
            stay: weights, and what all blocks share: on the device in any case.
        """
        self._offload = offload
        self._stay = {_storage(local) for x in stay if (local := _plain(x)) is not None}
        self.inputs: dict[tuple[int, int, int], tuple[Tensor, _Copy]] = {}
        """What was copied, by its place in memory: held during the forward, so that no other tensor
        can have it.
        """
        self._copies: list[weakref.ref[_Copy]] = []

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of `tensor`, which may be the tensor itself."""
        local = _plain(tensor)
        if (
            local is None
            or local.nbytes < SMALL
            or _storage(local) in self._stay
            or not _is_dense(local)
        ):
            return tensor
        key = _storage(local), local.storage_offset(), local.numel()
        if key not in self.inputs:
            flat = local.detach().as_strided((local.numel(),), (1,))
            copy = _Copy(flat, self._offload.streams(local.device))
            self.inputs[key] = flat, copy
            self._copies.append(weakref.ref(copy))
            self._offload.moved += flat.nbytes
        return _Saved(self.inputs[key][1], tensor, local)

    def fetch(self) -> None:
        """Start to copy back what is still needed."""
        for known in self._copies:
            if (copy := known()) is not None:
                copy.fetch()


class _Copy:
    """A one-dimensional tensor in host memory."""

    def __init__(self, source: Tensor, streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None):
        self._device = source.device
        self._streams = streams
        self._back: Tensor | None = None
        if streams is None:
            self._host = source.to("cpu", copy=True)
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        streams[0].wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(streams[0]):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(streams[0])
        self._sent = streams[0].record_event()

    def fetch(self) -> None:
        if self._back is not None:
            return
        if self._streams is None:
            self._back = self._host.to(self._device, copy=True)
            return
        stream = self._streams[1]
        stream.wait_event(self._sent)
        with torch.cuda.stream(stream):
            self._back = self._host.to(self._device, non_blocking=True)
        self._arrived = stream.record_event()

    def take(self) -> Tensor:
        """The tensor on the device. The stream waits for it, not the host."""
        self.fetch()
        assert self._back is not None
        if self._streams is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._arrived)
            self._back.record_stream(stream)
        return self._back


class _Saved:
    """A view of a copy, as autograd holds it."""

    def __init__(self, copy: _Copy, tensor: Tensor, local: Tensor):
        self._copy = copy
        self._size = local.size()
        self._stride = local.stride()
        self._layout: dict[str, Any] | None = None
        if isinstance(tensor, DTensor):
            self._layout = {
                "device_mesh": tensor.device_mesh,
                "placements": tensor.placements,
                "run_check": False,
            }
            self._layout |= {"shape": tensor.size(), "stride": tensor.stride()}

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        local = saved._copy.take().as_strided(saved._size, saved._stride)
        return local if saved._layout is None else DTensor.from_local(local, **saved._layout)


def _plain(x: Any) -> Tensor | None:
    """This rank's part of a tensor; None if that is of a class of its own, such as a weight in
    Float8.
    """
    local = x._local_tensor if isinstance(x, DTensor) else x
    return local if type(local) in (Tensor, nn.Parameter) else None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous part of the storage, in whatever order."""
    expected = 1
    for stride, size in sorted(
        (x, n) for x, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
