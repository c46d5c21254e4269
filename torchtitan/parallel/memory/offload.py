"""Activation offload: tensors that a block saves for its backward are kept in host memory.

torch's `saved_tensors_hooks` see everything that autograd saves, also in a compiled block; in a
checkpointed block, only its inputs. Copies to the host run on a separate stream, during the
forward. Copies back start when the backward reaches the next block, one block ahead of their use.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchtitan.config.derive import offloaded_blocks
from torchtitan.config.sections.parallelism import ActivationCheckpoint
from torchtitan.models.protocols import Model
from torchtitan.parallel.collectives import layout_of, local
from torchtitan.parallel.memory.regions import replace_method

SMALL = 2**12
"""Bytes below which a tensor stays on the device: copying it costs more than it frees."""
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]
"""The streams that copy to the host, and back."""


def apply_activation_offload(model: Model, ac: ActivationCheckpoint) -> "Offload":
    """Offload the tensors that the first `ac.offload_blocks` blocks of `model` save, in place.

    Must come after checkpointing and compilation, which decide what is saved, and before FSDP,
    which gathers the weights around `forward`.
    """
    offload = Offload()
    count = offloaded_blocks(ac, len(model.layers))
    if count == 0:
        return offload
    # One more block is wrapped: its backward starts copying back the previous block's tensors.
    for index, block in enumerate([*model.layers.values()][: count + 1]):
        wrap = partial(offload.wrap, first=index == 0, offloads=index < count)
        replace_method(block, "forward", wrap)
    return offload


class Offload:
    """The host copies of a model's blocks."""

    def __init__(self) -> None:
        self.bytes_copied = 0
        """Bytes copied to the host so far."""
        self._previous: _Visit | None = None
        """The visit to the previous block in the current forward."""
        self._streams: Streams | None = None

    def wrap(
        self, forward: Callable[..., Any], *, first: bool, offloads: bool
    ) -> Callable[..., Any]:
        """Wrap a block's `forward`.

        Args:
            first: the block is the model's first.
            offloads: keep in host memory what its backward needs.
        """

        def offloading_forward(block: nn.Module, x: Tensor, *shared_inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(block, x, *shared_inputs)
            previous = None if first else self._previous
            visit = _Visit(self, stay=[*block.parameters(), *block.buffers(), *shared_inputs])
            self._previous = visit
            with saved_tensors_hooks(visit.pack, _SavedView.unpack) if offloads else nullcontext():
                out = forward(block, x, *shared_inputs)
            visit.copies.clear()
            # A mixture of experts also returns its load.
            hidden = out[0] if isinstance(out, tuple) else out
            if previous is not None and hidden.requires_grad:
                hidden.register_hook(lambda _: previous.fetch())
            return out

        return offloading_forward

    def streams(self, device: torch.device) -> Streams | None:
        """None if copies can't overlap with computation."""
        if device.type == "cuda" and self._streams is None:
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams


class _Visit:
    """One forward of one block."""

    def __init__(self, offload: Offload, stay: Iterable[Any]):
        """
        Args:
            stay: tensors that stay on the device: weights, and inputs that all blocks share.
        """
        self._offload = offload
        plain = (_plain(x) for x in stay)
        self._stay = {_storage(shard) for shard in plain if shard is not None}
        self.copies: dict[tuple[int, int, int], tuple[Tensor, _Copy]] = {}
        """Offloaded tensors by their location in memory. Holding them prevents its reuse during the
        forward.
        """
        self._references: list[weakref.ref[_Copy]] = []

    def pack(self, tensor: Tensor) -> Any:
        """The object that autograd saves for `tensor`: a copy on the host, or the tensor itself."""
        shard = _plain(tensor)
        if shard is None or shard.nbytes < SMALL or not _is_dense(shard):
            return tensor
        if _storage(shard) in self._stay:
            return tensor
        key = (_storage(shard), shard.storage_offset(), shard.numel())
        if key not in self.copies:
            flat = shard.detach().as_strided((shard.numel(),), (1,))
            copy = _Copy(flat, self._offload.streams(shard.device))
            self.copies[key] = (flat, copy)
            self._references.append(weakref.ref(copy))
            self._offload.bytes_copied += flat.nbytes
        _, copy = self.copies[key]
        return _SavedView(copy, tensor, shard)

    def fetch(self) -> None:
        """Start to copy back the tensors that are still needed."""
        for reference in self._references:
            copy = reference()
            if copy is not None:
                copy.fetch()


class _Copy:
    """A one-dimensional tensor in host memory."""

    def __init__(self, source: Tensor, streams: Streams | None):
        self._device = source.device
        self._streams = streams
        self._back: Tensor | None = None
        if streams is None:
            self._host = source.to("cpu", copy=True)
            return
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream, _ = streams
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(stream)
        self._on_host = stream.record_event()

    def fetch(self) -> None:
        if self._back is not None:
            return
        if self._streams is None:
            self._back = self._host.to(self._device, copy=True)
            return
        _, stream = self._streams
        stream.wait_event(self._on_host)
        with torch.cuda.stream(stream):
            self._back = self._host.to(self._device, non_blocking=True)
        self._on_device = stream.record_event()

    def take(self) -> Tensor:
        """The tensor on the device. The stream waits for it, not the host."""
        self.fetch()
        assert self._back is not None
        if self._streams is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._on_device)
            self._back.record_stream(stream)
        return self._back


class _SavedView:
    """A view of a copy, as autograd holds it."""

    def __init__(self, copy: _Copy, tensor: Tensor, shard: Tensor):
        self._copy = copy
        self._size = shard.size()
        self._stride = shard.stride()
        self._to_layout = layout_of(tensor)

    @staticmethod
    def unpack(handle: Any) -> Tensor:
        if not isinstance(handle, _SavedView):
            return handle
        return handle._to_layout(handle._copy.take().as_strided(handle._size, handle._stride))


def _plain(x: Any) -> Tensor | None:
    """This rank's shard as a plain tensor; None for other classes, such as weights in Float8."""
    shard = local(x)
    return shard if type(shard) in (Tensor, nn.Parameter) else None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous part of the storage, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
