"""Where the host waits for the fake GPU. Tensors on the host are real, those on the GPU fake."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.cuda import gpu
from torchtitan.utils.torch_compat import replaced

_PACKAGE = str(Path(__file__).parents[2] / "torchtitan") + "/"
_BESIDE = f"{_PACKAGE}tools/"
_TO_COPY = torch.ops.aten._to_copy.default
_COPIES = (_TO_COPY, torch.ops.aten.copy_.default)
_READ = torch.ops.aten._local_scalar_dense.default
_NONZERO = torch.ops.aten.nonzero.default
_GROUPED_MM = torch.ops.aten._grouped_mm.default


class Host:
    """Records each time that the host waits for the GPU, by place."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """Keys: file, function, and what it waits for."""
        self._pinned: list[torch.UntypedStorage] = []

    def take(self) -> dict[str, int]:
        """The waits since the last call, sorted."""
        waits, self.waits = self.waits, Counter()
        self._pinned.clear()
        return dict(sorted(waits.items()))

    @contextmanager
    def watch(self, mode: FakeTensorMode) -> Iterator[None]:
        """Record operations under `mode`."""
        dispatch = FakeTensorMode.dispatch

        def seen(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if self is not mode or torch._guards.TracingContext.try_get() is not None:
                return dispatch(self, func, types, args, kwargs)
            kwargs = dict(kwargs or {})
            return host._run(
                func, args, kwargs, mode, lambda: dispatch(self, func, types, args, kwargs)
            )

        host = self
        with (
            replaced(FakeTensorMode, dispatch=seen),
            replaced(torch.cuda, synchronize=lambda *_: self._record("everything")),
            replaced(torch.cuda.Stream, synchronize=lambda _: self._record("a stream")),
            replaced(torch.cuda.Event, synchronize=lambda _: self._record("an event")),
            replaced(FakeTensor, tolist=lambda tensor: self._tolist(tensor)),
            replaced(Tensor, pin_memory=lambda tensor, *_: self._pin(tensor)),
        ):
            yield

    def _run(
        self, func: Any, args: Any, kwargs: Any, mode: FakeTensorMode, fake: Callable[[], Any]
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is _READ and isinstance(args[0], FakeTensor):
            return self._read(args[0])
        if func is _NONZERO and args[0].device.type == "cuda":
            self._record("value")
            found = min(args[0].numel(), 4)
            with mode:
                return torch.empty(found, args[0].dim(), dtype=torch.int64, device="cuda")
        if func is _GROUPED_MM and gpu.SM not in (90, 100):
            self._record("copy to the host")  # of the groups' ends; a product for each follows
        name = func.name().partition(".")[0]
        if func.namespace in ("torchtitan", "torchao") and name in OPDEFS:
            with mode:  # what the operator is composed of
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if func in _COPIES:
            self._copy(func, args, kwargs)
            if (target := _on_host(func, args, kwargs)) is not None:
                return target
        on_host = all(not isinstance(x, FakeTensor) and x.device.type == "cpu" for x in tensors)
        if on_host and not _targets_gpu(kwargs):
            pinned = kwargs.pop("pin_memory", False)
            with _disable_current_modes():
                out = func(*args, **kwargs)
            return self._pin(out) if pinned else out
        return fake()

    def _copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0].device, args[1]
            overlaps = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            source = args[0]
            target = kwargs.get("device") or source.device
            overlaps = kwargs.get("non_blocking", False)
        if target.type == source.device.type or "meta" in (target.type, source.device.type):
            return
        # A copy from pageable memory waits for the stream.
        pinned = source.device.type == "cuda" or self._is_pinned(source)
        if not (overlaps and pinned):
            self._record(f"copy to {'the GPU' if target.type == 'cuda' else 'the host'}")

    def _read(self, tensor: Tensor) -> bool | int | float:
        """A value for the host."""
        if tensor.device.type == "cuda":
            self._record("value")
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _tolist(self, tensor: Tensor) -> Any:
        value = self._read(tensor)  # one wait, however many values
        for size in reversed(tensor.shape):
            value = [value] * size
        return value

    def _pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        self._pinned.append(pinned.untyped_storage())
        return pinned

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(pinned._cdata == storage for pinned in self._pinned)

    def _record(self, what: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # training continues
        self.waits[f"{_place()}: {what}"] += 1


def _on_host(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The target of a copy from the GPU to the host: zeros, its content is unknown. None if it
    is another copy.
    """
    source = args[0] if func is _TO_COPY else args[1]
    if not (isinstance(source, FakeTensor) and source.device.type == "cuda"):
        return None
    with _disable_current_modes():
        if func is _TO_COPY:
            if torch.device(kwargs.get("device") or "cuda").type != "cpu":
                return None
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return None if isinstance(args[0], FakeTensor) else args[0].zero_()


def _targets_gpu(kwargs: Any) -> bool:
    """Whether an operation on no tensors, or on the host's, makes one on another device."""
    device = kwargs.get("device")
    if device is None:
        return False
    return torch.device(device).type != "cpu"


def _place() -> str:
    """File and function of the project that this is called from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_BESIDE):
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"{file.removeprefix(_PACKAGE)}:{function}"
        frame = frame.f_back
    return "outside of torchtitan"
