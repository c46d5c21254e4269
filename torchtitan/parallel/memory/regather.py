"""Inputs that tensor parallelism gathers along the sequence, kept for the backward as shards.

The linear layers that read a gathered input need it again for the gradients of their weights. Until
then this rank keeps its shard, 1 / tp of the bytes, and all-gathers it once more (Korthikanti et
al., arXiv:2205.05198, section 4.2.2). The numbers don't change.

In eager blocks, `saved_tensors_hooks` around the layers save the shard instead. Compilers don't run
such hooks inside a graph: there the gather is a checkpointed region, because torch's partitioner
recomputes no other collectives.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import checkpoint

from torchtitan.parallel.collectives import layout_of, local, storage_of
from torchtitan.parallel.memory.regions import replace_method

_MARK = "_torchtitan_gathered"
"""Attribute of a gathered tensor's storage, which its views share: its `_GatheredTensor`."""


def gather_sequence(x: DTensor) -> DTensor:
    """`[b, s / tp, ...]` on each rank -> `[b, s, ...]`. Layers of `ColumnsOfGathered` keep `x`."""
    if torch.compiler.is_compiling():
        whole: DTensor = checkpoint(_gather, x, use_reentrant=False)
        return whole
    whole = _gather(x)
    if torch.is_grad_enabled() and not _recomputes():
        setattr(storage_of(whole).untyped_storage(), _MARK, _GatheredTensor(x))
    return whole


class ColumnsOfGathered(ParallelStyle):
    """Splits the outputs of a linear layer, which saves only the shard of its gathered input."""

    def __init__(self, split: ParallelStyle, gather: ParallelStyle | None = None):
        """
        Args:
            gather: gathers the layer's input; None if a module around it already does.
        """
        self._split = split
        self._gather = gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replace_method(module, "forward", _keep_shards)
        if self._gather is not None:
            self._gather._apply(module, device_mesh)
        return self._split._apply(module, device_mesh)


def _gather(x: DTensor) -> DTensor:
    return x.redistribute(placements=[Replicate()])


class _GatheredTensor:
    """A gathered tensor between its forward and its backward."""

    def __init__(self, shard: DTensor):
        pack, self._unpack = _outer_hooks()
        self._shard = pack(shard.detach())
        self._whole: DTensor | None = None
        self._num_saves = 0
        """Number of times that layers save it."""
        self._num_takes = 0

    def keep(self) -> None:
        self._num_saves += 1

    def take(self) -> DTensor:
        """The whole tensor: gathered for the first layer that needs it, and freed after the last.

        If a backward is split into inputs and weights, each half gathers once: autograd unpacks
        everything that an operation saved, for either gradient.
        """
        if self._whole is None:
            self._whole = _gather(self._unpack(self._shard))
        whole = self._whole
        self._num_takes += 1
        if self._num_takes % self._num_saves == 0:
            self._whole = None
        return whole


class _View:
    """A saved reference to the gathered tensor, or to a view of it."""

    def __init__(self, source: _GatheredTensor, tensor: Tensor):
        source.keep()
        self._gathered = source
        view = local(tensor)
        self._geometry = view.size(), view.stride(), view.storage_offset()
        self._to_layout = layout_of(tensor)

    def unpack(self) -> Tensor:
        view = local(self._gathered.take())
        if (view.size(), view.stride(), view.storage_offset()) != self._geometry:
            view = view.as_strided(*self._geometry)
        return self._to_layout(view)


@cache
def _keep_shards(forward: Callable[..., Any]) -> Callable[..., Any]:
    def keeping_forward(layer: nn.Module, x: Tensor) -> Any:
        if torch.compiler.is_compiling() or _recomputes():
            return forward(layer, x)
        pack_other, unpack_other = _outer_hooks()

        def pack(tensor: Tensor) -> Any:
            source = getattr(storage_of(tensor).untyped_storage(), _MARK, None)
            return pack_other(tensor) if source is None else _View(source, tensor)

        def unpack(handle: Any) -> Tensor:
            return handle.unpack() if isinstance(handle, _View) else unpack_other(handle)

        with saved_tensors_hooks(pack, unpack):
            return forward(layer, x)

    return keeping_forward


def _outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The hooks of activation offload around these, which would otherwise be replaced."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or (_same, _same)


def _same(x: Any) -> Any:
    return x


def _recomputes() -> bool:
    """Whether this runs in a checkpointed region, whose recomputation gathers anyway."""
    pack, _ = _outer_hooks()
    return pack.__module__ == checkpoint.__module__
