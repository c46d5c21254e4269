"""Records what a rank does on the fake process group: groups, collectives, sends, receives and values that it reads.

Tensor collectives are seen by a dispatch mode below DTensor. Those of objects, sends and receives are replaced, because
their results would be data that no rank has sent.
"""

import functools
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchtitan.observe.evidence import is_library, where
from torchtitan.plan.tracer import INSIDE, group_name, nbytes, tensors
from torchtitan.rehearse.cast import coordinates
from torchtitan.rehearse.events import Collective, Creation, Group, Message, Post, Read, Record, Wait

_OPS = (
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("all_gather", "all_gather"),
    ("allgather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("barrier", "barrier"),
)
"""Part of an operator's name, and the collective that it is; the first match wins."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_OWN = __file__.rpartition("/")[0]
_HELPERS = ("all_reduce", "gather", "from_rank_0", "together", "redistribute_and_wait", "AnyRank.__init__")
"""Functions that communicate for others: the place of a collective is their caller's."""


class Recorder(TorchDispatchMode):
    """Fills the `Record` of one rank."""

    def __init__(self, rank: int, degrees: Mapping[str, int], told: list[Any] | None, *, large: bool):
        """
        Args:
            degrees: of the mesh axes, from outer to inner.
            told: what rank 0 broadcasts, in order; None on rank 0.
            large: what a rank reads of its own tensors is large and true, otherwise small and false. Ranks that are
                compared get different ones.
        """
        super().__init__()
        self.record, self.degrees, self.told, self.large = Record(rank), degrees, told, large
        self.during = "start"
        self.slots: dict[str, int] = {}
        """By the group's name."""
        self._axes: dict[int, frozenset[str]] = {}
        self._counts: dict[int, int] = {}
        self._posts = self._heard = 0
        self._gathered: Any = None
        self._op = ""
        self._all = frozenset(axis for axis, degree in degrees.items() if degree > 1)

    # ---- groups

    def created(self, ranks: tuple[int, ...], description: str, name: str | None) -> None:
        """A group was created. `name` is None if this rank is not a member."""
        at, world = self._at(), math.prod(self.degrees.values())
        spanning = (axis for axis, degree in self.degrees.items() if degree == world > 1)
        if description == "default_pg":
            description = " = ".join(["all ranks", *spanning])
        description = description.removeprefix("mesh_")
        self.record.creations.append(Creation(ranks, description, at))
        if name is not None:
            slot = self.slots[name] = len(self.record.groups)
            self.record.groups.append(Group(ranks, description, at))
            self._axes[slot] = self._axes_of(ranks)

    def _axes_of(self, ranks: tuple[int, ...]) -> frozenset[str]:
        """Mesh axes that a group spans whole."""
        places = [coordinates(rank, self.degrees) for rank in ranks]
        spans = {axis: len({place[axis] for place in places}) for axis in self.degrees}
        whole = {axis for axis, degree in self.degrees.items() if degree > 1 and spans[axis] == degree}
        count = 1
        for axis in whole:
            count *= self.degrees[axis]
        return frozenset(whole) if count == len(ranks) else frozenset()

    def slot(self, group: ProcessGroup | None) -> int:
        return self.slots[(group or dist.group.WORLD).group_name]  # type: ignore[union-attr]

    # ---- collectives

    def entered(self, slot: int, op: str, what: str, size: int, root: int | None = None) -> None:
        if len(self.record.groups[slot].ranks) == 1:
            return
        number = self._counts[slot] = self._counts.get(slot, 0) + 1
        self.record.events.append(Collective(slot, number, op, what, size, root, self._at(), self.during))

    def posted(self, slot: int, messages: list[Message], *, pair: bool) -> "_Work":
        post = Post(slot, self._posts, tuple(messages), pair, self._at(), self.during)
        self._posts += 1
        self.record.events.append(post)
        return _Work(self, post.number)

    def waited(self, post: int) -> None:
        self.record.events.append(Wait(post, self._at()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace == "torchtitan" and func.name() in INSIDE:
            with self:
                return INSIDE[func.name()](*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(args[0])
        if func.namespace in _NAMESPACES:
            return self._collective(func, args, kwargs)
        out = func(*args, **kwargs)
        self._propagate(func, (*args, *kwargs.values()), out)
        return out

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        kind = next((op for text, op in _OPS if text in name), None)
        slot = self.slots.get(group_name((*args, *kwargs.values())))
        if kind is None or slot is None:
            for result in tensors(out):  # wait_tensor
                _mark(result, _shared(tensors(args)))
            return out
        inputs = list(tensors(args))
        if func.namespace == "c10d" and kind in ("all_gather", "reduce_scatter"):
            inputs = sorted(inputs, key=nbytes)[:: -1 if kind == "reduce_scatter" else 1][:1]
        elif func.namespace == "c10d" and kind != "barrier":
            inputs = inputs[:1] if kind in ("broadcast", "all_reduce") else inputs[-1:]
        if kind == "barrier":
            inputs = []
        what = ", ".join(_describe(x, kind) for x in inputs)
        if kind in ("all_reduce", "reduce_scatter", "reduce"):
            what += f" {_reduction(args) or self._op}"
        root = None
        if kind in ("broadcast", "gather", "scatter", "reduce") and func.namespace == "c10d":
            root = next((arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)), None)
        self.entered(slot, kind, what, sum(map(nbytes, inputs)), root)
        before = _shared(tensors(args))
        for result in (*tensors(out), *(tensors(args) if func.namespace == "c10d" else ())):
            gives_all = kind in ("all_reduce", "all_gather", "broadcast")
            _mark(result, before | self._axes[slot] if gives_all else before - self._axes[slot])
        return out

    def reducing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A reduction of torch.distributed, whose operator doesn't say which one it is."""

        @functools.wraps(call)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            self._op = _reduction((*args, *kwargs.values())) or "sum"
            return call(*args, **kwargs)

        return reduce

    # ---- values

    def _read(self, tensor: Tensor) -> bool | int | float:
        """A value for the host: the same on all ranks if all are known to compute the same, else this rank's own."""
        if not isinstance(tensor, FakeTensor):
            return tensor.item()
        shared = _shared([tensor]) >= self._all
        read = Read(self._at(), shared)
        self.record.reads[read] = self.record.reads.get(read, 0) + 1
        if not shared:
            self.record.own_reads.append((len(self.record.events), read.at))
        large = self.large and not shared
        if tensor.dtype is torch.bool:
            return large
        return (1e4 if large else 1.0) if tensor.dtype.is_floating_point else 16 if large else 1

    def _propagate(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """A result is the same on all ranks along an axis if all inputs are."""
        inputs = list(tensors(args))
        if inputs:
            marks = _shared(inputs)
        else:
            constant = func._overloadpacket.__name__ in ("zeros", "ones", "arange")
            marks = self._all if constant else frozenset()
        for result in tensors(out):
            _mark(result, marks)

    # ---- objects

    def told_by_rank_0(self, values: list[Any], root: int, group: ProcessGroup | None) -> None:
        """A broadcast of objects: rank 0's own, or what rank 0 told in its rehearsal."""
        size = len(pickle.dumps(values)) if self.record.rank == root else 0
        self._object("broadcast_object_list", group, size, root)
        if root != 0:
            return
        if self.told is None:
            self.record.broadcasts.append(list(values))
        elif self._heard < len(self.told):
            values[:] = self.told[self._heard]
        self._heard += 1

    def _object(self, op: str, group: ProcessGroup | None, size: int, root: int | None = None) -> None:
        slot = self.slot(group)
        index = None if root is None else self.record.groups[slot].ranks.index(root)
        self.entered(slot, op, "object", size, index)
        key = f"{self.during}: {op} at {self._at()}"
        calls, total = self.record.objects.get(key, (0, 0))
        self.record.objects[key] = calls + 1, total + size

    def all_gather_object(self, object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
        self._object("all_gather_object", group, len(pickle.dumps(obj)))
        object_list[:] = [obj] * len(object_list)

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: ProcessGroup | None = None,
        device: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> None:
        self.told_by_rank_0(object_list, self._global(src, group_src, group), group)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
    ) -> None:
        self._object("gather_object", group, len(pickle.dumps(obj)), self._global(dst, group_dst, group))
        self._gathered = obj
        if object_gather_list is not None:
            object_gather_list[:] = [obj] + [_without_items(obj)] * (len(object_gather_list) - 1)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
    ) -> None:
        own = scatter_object_input_list[0] if scatter_object_input_list else self._gathered
        self._object("scatter_object_list", group, len(pickle.dumps(own)), self._global(src, group_src, group))
        scatter_object_output_list[0] = own

    def _global(self, rank: int | None, in_group: int | None, group: ProcessGroup | None) -> int:
        if in_group is not None:
            return self.record.groups[self.slot(group)].ranks[in_group]
        return rank or 0

    # ---- sends and receives

    def _message(self, sends: bool, tensor: Tensor, peer: int | None, in_group: int | None, group: Any) -> Message:
        other = self._global(peer, in_group, group)
        if not sends:
            _mark(tensor, frozenset())
        return Message(sends, other, _describe(tensor, "send"), nbytes(tensor))

    def isend(
        self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
    ) -> "_Work":
        return self.posted(self.slot(group), [self._message(True, tensor, dst, group_dst, group)], pair=True)

    def irecv(
        self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
    ) -> "_Work":
        return self.posted(self.slot(group), [self._message(False, tensor, src, group_src, group)], pair=True)

    def send(self, *args: Any, **kwargs: Any) -> None:
        self.isend(*args, **kwargs).wait()

    def recv(self, *args: Any, **kwargs: Any) -> None:
        self.irecv(*args, **kwargs).wait()

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list["_Work"]:
        group = operations[0].group
        messages = [
            self._message(o.op is distributed_c10d.isend, o.tensor, None, o.group_peer, group) for o in operations
        ]
        return [self.posted(self.slot(group), messages, pair=False)]

    # ---- places

    def _at(self) -> str:
        """The line outside of libraries that this is called from."""
        frame: FrameType | None = sys._getframe(2)
        last = None
        while frame is not None:
            name = frame.f_code.co_filename
            if not _skipped(name) and frame.f_code.co_qualname not in _HELPERS:
                return _where(name, frame.f_lineno, frame.f_code.co_qualname)
            last = frame
            frame = frame.f_back
        assert last is not None
        return _where(last.f_code.co_filename, last.f_lineno, last.f_code.co_qualname)


class _Work:
    """Replaces `dist.Work` of a send or receive."""

    def __init__(self, recorder: Recorder, post: int):
        self._recorder, self._post, self._done = recorder, post, False

    def wait(self, *_: Any) -> bool:
        if not self._done:
            self._recorder.waited(self._post)
        self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done


@functools.cache
def _skipped(file: str) -> bool:
    return is_library(file) or file.startswith(_OWN) or file.endswith("plan/fake.py")


@functools.cache
def _where(file: str, line: int, function: str) -> str:
    return where([(file, line, function.partition(".<locals>")[0])])


def _without_items(plan: Any) -> Any:
    """The plan of another rank for a save or load, of which only that it has one matters here."""
    import dataclasses

    return dataclasses.replace(plan, items=[]) if hasattr(plan, "items") and dataclasses.is_dataclass(plan) else plan


def _describe(tensor: Tensor, kind: str) -> str:
    shape = list(tensor.shape)
    text: list[int | str] = [*shape]
    if kind == "all_to_all" and shape:
        text[0] = "any"  # checked as exchanges
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(map(str, text))}]"


def _reduction(args: tuple[Any, ...]) -> str:
    """The reduction of a call of torch.distributed, or of an operator that names it; empty for c10d's operators."""
    for arg in args:
        if isinstance(arg, str) and arg in ("sum", "avg", "max", "min", "product"):
            return arg
        if isinstance(arg, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return re.sub(r"[^a-z_].*", "", str(arg).lower().removeprefix("<").removeprefix("redoptype."))
    return ""


def _shared(inputs: Any) -> frozenset[str]:
    """Axes along which all ranks hold the same values."""
    found: frozenset[str] | None = None
    for tensor in inputs:
        own = getattr(tensor, "_rehearsed", frozenset())
        found = own if found is None else found & own
        if not found:
            break
    return found or frozenset()


def _mark(tensor: Tensor, axes: frozenset[str]) -> None:
    if axes or hasattr(tensor, "_rehearsed"):
        tensor._rehearsed = axes  # type: ignore[attr-defined]


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Replace what makes groups, exchanges objects, sends and receives, and record the rest."""
    create = distributed_c10d._new_process_group_helper

    @functools.wraps(create)
    def created(
        size: int, place: int, ranks: list[int], backend: Any, store: Any, name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with _disable_current_modes():
            made = create(size, place, ranks, "fake", store, name, *args, **kwargs)
        members = tuple(ranks) or tuple(range(size))
        member = made[0] is not dist.GroupMember.NON_GROUP_MEMBER
        recorder.created(members, kwargs.get("group_desc") or "default_pg", name if member else None)
        return made

    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    names += ("isend", "irecv", "send", "recv", "batch_isend_irecv")
    with ExitStack() as stack:
        stack.enter_context(patch.object(distributed_c10d, "_new_process_group_helper", created))
        for name in names:
            replacement: Callable[..., Any] = getattr(recorder, name)
            if name in ("isend", "irecv"):  # compared by identity
                replacement = functools.partial(replacement)
            for module in (dist, distributed_c10d):
                stack.enter_context(patch.object(module, name, replacement))
        for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "reduce"):
            replacement = recorder.reducing(getattr(dist, name))
            for module in (dist, distributed_c10d):
                stack.enter_context(patch.object(module, name, replacement))
        yield
