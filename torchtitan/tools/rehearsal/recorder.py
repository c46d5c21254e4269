"""Records what a rank does on the fake process group: groups, collectives of tensors, and values
that it reads.

A dispatch mode below DTensor sees collectives of tensors. `network.py` adds those of objects, sends
and receives.
"""

import functools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.health.rank_dumps import is_library, where
from torchtitan.tools.planner.tracer import INSIDE, group_name, nbytes, tensors
from torchtitan.tools.rehearsal.events import (
    Collective,
    Creation,
    Group,
    Message,
    Post,
    Read,
    Record,
    Wait,
)
from torchtitan.tools.rehearsal.rank_sample import coordinates

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
_HELPERS = (
    "all_reduce",
    "gather",
    "from_rank_0",
    "together",
    "redistribute_and_wait",
    "AnyRank.__init__",
)
"""Functions that communicate for others: the place of a collective is their caller's."""


_MOST_READS = 20_000
"""Reads of values by one line, above which it is taken for a loop. The optimizer reads a few per
parameter.
"""


class EndlessLoopError(Exception):
    """A loop waits for a value to change, which the values of a rehearsal never do. Its text is the
    loop's line.
    """


class Recorder(TorchDispatchMode):
    """Fills the `Record` of one rank."""

    def __init__(self, rank: int, degrees: Mapping[str, int], *, large: bool):
        """
        Args:
            degrees: of the mesh axes, from outer to inner.
            large: what a rank reads of its own tensors is large and true, otherwise small and
            false. Ranks that are
                compared get different ones.
        """
        super().__init__()
        self.record = Record(rank)
        self.degrees = degrees
        self.large = large
        self.during = "start"
        self.slots: dict[str, int] = {}
        """By the group's name."""
        self._axes: dict[int, frozenset[str]] = {}
        self._counts: dict[int, int] = {}
        self._posts = 0
        self.reduction = ""
        """Of the call of torch.distributed that runs; c10d's operators don't say which it is."""
        self._all = frozenset(axis for axis, degree in degrees.items() if degree > 1)

    # ---- groups

    def created(self, ranks: tuple[int, ...], description: str, name: str | None) -> None:
        """A group was created. `name` is None if this rank is not a member."""
        at = self.at()
        world = math.prod(self.degrees.values())
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
        whole = {
            axis for axis, degree in self.degrees.items() if degree > 1 and spans[axis] == degree
        }
        count = 1
        for axis in whole:
            count *= self.degrees[axis]
        return frozenset(whole) if count == len(ranks) else frozenset()

    def slot(self, group: ProcessGroup | None) -> int:
        return self.slots[(group or dist.group.WORLD).group_name]

    # ---- collectives

    def entered(
        self,
        slot: int,
        op: str,
        what: str,
        size: int,
        root: int | None = None,
    ) -> None:
        if len(self.record.groups[slot].ranks) == 1:
            return
        number = self._counts[slot] = self._counts.get(slot, 0) + 1
        self.record.events.append(
            Collective(slot, number, op, what, size, root, self.at(), self.during)
        )

    def posted(self, slot: int, messages: Sequence[Message], *, pair: bool) -> int:
        """Sends and receives begin; the number of the post."""
        post = Post(slot, self._posts, tuple(messages), pair, self.at(), self.during)
        self._posts += 1
        self.record.events.append(post)
        return post.number

    def waited(self, post: int) -> None:
        self.record.events.append(Wait(post, self.at()))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
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
                mark(result, _shared(tensors(args)))
            return out
        inputs = list(tensors(args))
        if func.namespace == "c10d" and kind in ("all_gather", "reduce_scatter"):
            inputs = sorted(inputs, key=nbytes)[:: -1 if kind == "reduce_scatter" else 1][:1]
        elif func.namespace == "c10d" and kind != "barrier":
            inputs = inputs[:1] if kind in ("broadcast", "all_reduce") else inputs[-1:]
        if kind == "barrier":
            inputs = []
        what = ", ".join(describe(x, kind) for x in inputs)
        if kind in ("all_reduce", "reduce_scatter", "reduce"):
            what += f" {reduction(args) or self.reduction}"
        root = None
        if kind in ("broadcast", "gather", "scatter", "reduce") and func.namespace == "c10d":
            root = next(
                (arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)), None
            )
        self.entered(slot, kind, what, sum(map(nbytes, inputs)), root)
        before = _shared(tensors(args))
        for result in (*tensors(out), *(tensors(args) if func.namespace == "c10d" else ())):
            gives_all = kind in ("all_reduce", "all_gather", "broadcast")
            mark(result, before | self._axes[slot] if gives_all else before - self._axes[slot])
        return out

    # ---- values

    def _read(self, tensor: Tensor) -> bool | int | float:
        """A value for the host: the same on all ranks if all are known to compute the same, else
        this rank's own.

        Raises:
            EndlessLoopError: this line reads values without end.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor.item()
        shared = _shared([tensor]) >= self._all
        read = Read(self.at(), shared)
        count = self.record.reads.get(read, 0) + 1
        self.record.reads[read] = count
        if count > _MOST_READS:
            raise EndlessLoopError(read.at)
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
            mark(result, marks)

    # ---- places

    def at(self) -> str:
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


@functools.cache
def _skipped(file: str) -> bool:
    return is_library(file) or file.startswith(_OWN) or file.endswith("planner/fake.py")


@functools.cache
def _where(file: str, line: int, function: str) -> str:
    return where([(file, line, function.partition(".<locals>")[0])])


def describe(tensor: Tensor, kind: str) -> str:
    shape = list(tensor.shape)
    text: list[int | str] = [*shape]
    if kind == "all_to_all" and shape:
        text[0] = "any"  # checked as exchanges
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(map(str, text))}]"


def reduction(args: tuple[Any, ...]) -> str:
    """The reduction of a call of torch.distributed, or of an operator that names it; empty for
    c10d's operators.
    """
    for arg in args:
        if isinstance(arg, str) and arg in ("sum", "avg", "max", "min", "product"):
            return arg
        if isinstance(arg, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return re.sub(
                r"[^a-z_].*", "", str(arg).lower().removeprefix("<").removeprefix("redoptype.")
            )
    return ""


def _shared(inputs: Any) -> frozenset[str]:
    """Axes along which all ranks hold the same values."""
    found: frozenset[str] | None = None
    for tensor in inputs:
        own: frozenset[str] = getattr(tensor, "_rehearsed", frozenset())
        found = own if found is None else found & own
        if not found:
            break
    return found or frozenset()


def mark(tensor: Tensor, axes: frozenset[str]) -> None:
    if axes or hasattr(tensor, "_rehearsed"):
        tensor._rehearsed = axes
