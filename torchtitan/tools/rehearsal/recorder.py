"""Records a rank on the fake process group: its groups, collectives, and values that it reads.

A dispatch mode below DTensor sees collectives of tensors. `network.py` adds collectives of objects,
sends and receives.
"""

import functools
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.checkpoint.save import Phases
from torchtitan.health.collectives import Group, describe_group
from torchtitan.health.rank_dumps import is_library, where
from torchtitan.parallel import agree, collectives
from torchtitan.parallel.context.attention import ring_attention, ring_attention_backward
from torchtitan.tools.rehearsal.events import Creation, Entry, Message, Post, RankRecord, Wait
from torchtitan.tools.rehearsal.rank_sample import VALUES, coordinates
from torchtitan.utils.torch_compat import redistribute_and_wait

_KINDS = (
    *("reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast"),
    *("gather", "scatter", "reduce", "barrier"),
)
"""Collectives, which operators' names contain with or without underscores; the first match wins."""
_REDUCTIONS = ("sum", "avg", "max", "min", "product")
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_REHEARSAL_FOLDER = __file__.rpartition("/")[0]
_HELPERS = {
    function.__qualname__
    for function in (
        collectives.all_reduce,
        collectives.gather_values,
        collectives.AnyRank.__init__,
        agree.from_rank_0,
        agree.problems_from_all,
        agree.from_all,
        agree.together,
        Phases.run,
        redistribute_and_wait,
    )
}
"""Functions that communicate for others: the place of a collective is their caller's."""
_ROOTED = ("broadcast", "gather", "scatter", "reduce")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
INSIDE = {op._qualname: op._init_fn for op in (ring_attention, ring_attention_backward)}
"""Implementations of custom operators that call others, which their fake versions would hide.
"""
_ENDLESS_READS = 20_000
"""A line that reads more values is in an endless loop. The optimizer reads a few per parameter."""


class EndlessLoopError(Exception):
    """A loop waits for a value of a rehearsal to change."""


class Recorder(TorchDispatchMode):
    """Fills the `RankRecord` of one rank."""

    def __init__(self, rank: int, degrees: Mapping[str, int], *, values: int):
        """
        Args:
            degrees: degree of each mesh axis, from outer to inner.
            values: index in `VALUES` of what the host reads of the rank's own tensors; booleans are
                true from 1 on. Ranks that are compared get different ones.
        """
        super().__init__()
        self.record = RankRecord(rank)
        self.degrees = degrees
        self.values = values
        self.during = "start"
        self.slots: dict[str, int] = {}
        """torch's name of a group to its slot."""
        self._axes: dict[int, frozenset[str]] = {}
        self._counts = Counter[int]()
        """Number of collectives entered in each slot."""
        self._reads = Counter[str]()
        """Number of values that the host read at each line."""
        self.reduction = ""
        """Reduction of the running call of torch.distributed; c10d's operators don't name it."""
        self._all_axes = frozenset(axis for axis, degree in degrees.items() if degree > 1)

    # ---- groups

    def add_group(self, ranks: tuple[int, ...], description: str, name: str | None) -> None:
        """Record a new group. `name` is None if this rank is not a member."""
        at = self.at()
        description = describe_group(description, ranks, self.degrees)
        self.record.creations.append(Creation(ranks, description, at))
        if name is not None:
            slot = len(self.record.groups)
            self.slots[name] = slot
            self.record.groups.append(Group(ranks, description, at))
            self._axes[slot] = self._axes_of(ranks)

    def _axes_of(self, ranks: tuple[int, ...]) -> frozenset[str]:
        """Mesh axes that a group spans completely; none if it also spans a part of another axis."""
        positions = [coordinates(rank, self.degrees) for rank in ranks]
        full_axes = [
            axis
            for axis in self._all_axes
            if len({position[axis] for position in positions}) == self.degrees[axis]
        ]
        size = math.prod(self.degrees[axis] for axis in full_axes)
        return frozenset(full_axes if size == len(ranks) else ())

    def slot(self, group: ProcessGroup | None) -> int:
        return self.slots[(group or dist.group.WORLD).group_name]

    # ---- collectives

    def add_entry(self, slot: int, op: str, what: str, size: int, root: int | None = None) -> None:
        group = self.record.groups[slot]
        if len(group.ranks) == 1:
            return
        self._counts[slot] += 1
        number = self._counts[slot]
        self.record.events.append(
            Entry(group, number, op, what, self.at(), root, self.during, slot=slot, bytes=size)
        )

    def add_post(self, slot: int, messages: Sequence[Message], *, pair: bool) -> int:
        """Record sends and receives that begin; returns the number of the post."""
        number = len(self.record.posts)
        post = Post(slot, number, tuple(messages), pair, at=self.at(), during=self.during)
        self.record.events.append(post)
        return number

    def add_wait(self, post: int) -> None:
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
        axes = _common_axes(tensors(args))
        kind = _kind(func)
        slot = self.slots.get(group_name((*args, *kwargs.values())))
        if kind is None or slot is None:
            for result in tensors(out):  # wait_tensor
                mark(result, axes)
            return out
        in_place = func.namespace == "c10d"
        inputs = _inputs(kind, list(tensors(args)), in_place)
        what = ", ".join(describe(x, kind) for x in inputs)
        if kind in _REDUCING:
            what += f" {reduction(args) or self.reduction}"
        root = None
        if in_place and kind in _ROOTED:
            root = next((x for x in args if type(x) is int), None)
        self.add_entry(slot, kind, what, sum(map(nbytes, inputs)), root=root)
        if kind in ("all_reduce", "all_gather", "broadcast"):
            axes |= self._axes[slot]
        else:
            axes -= self._axes[slot]
        results = [*tensors(out), *tensors(args)] if in_place else list(tensors(out))
        for result in results:
            mark(result, axes)
        return out

    # ---- values

    def _read(self, tensor: Tensor) -> bool | int | float:
        """A value for the host: the same on all ranks if it must be, else this rank's value.

        Raises:
            EndlessLoopError: this line reads values without end.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor.item()
        shared = _common_axes([tensor]) >= self._all_axes
        at = self.at()
        self._reads[at] += 1
        if self._reads[at] > _ENDLESS_READS:
            raise EndlessLoopError(
                f"did not leave a loop at {at}: it waits for a tensor's value to change, and "
                "the values of a rehearsal are made up. Bound the number of its turns"
            )
        if not shared:
            self.record.local_reads.append((len(self.record.events), at))
        values = 0 if shared else self.values
        if tensor.dtype is torch.bool:
            return values > 0
        return float(VALUES[values]) if tensor.dtype.is_floating_point else VALUES[values]

    def _propagate(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """A result is the same on all ranks along an axis if all inputs are."""
        inputs = list(tensors(args))
        marks = _common_axes(inputs)
        if not inputs and func._overloadpacket.__name__ in ("zeros", "ones", "arange"):
            marks = self._all_axes
        for result in tensors(out):
            mark(result, marks)

    # ---- places

    def at(self) -> str:
        """The line outside of libraries that this is called from."""
        frame: FrameType = sys._getframe(2)
        while frame.f_back is not None:
            code = frame.f_code
            if not is_hidden(code.co_filename) and code.co_qualname not in _HELPERS:
                break
            frame = frame.f_back
        return _where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


@functools.cache
def is_hidden(file: str) -> bool:
    """Whether a file is a library's or the rehearsal's, so that its lines aren't reported."""
    return is_library(file) or file.startswith(_REHEARSAL_FOLDER)


@functools.cache
def _where(file: str, line: int, function: str) -> str:
    return where([(file, line, function.partition(".<locals>")[0])])


def _kind(func: Any) -> str | None:
    """The kind of collective of an operator; None if it is none."""
    name = func._overloadpacket.__name__.replace("_", "")
    return next((kind for kind in _KINDS if kind.replace("_", "") in name), None)


def _inputs(kind: str, operands: list[Tensor], in_place: bool) -> list[Tensor]:
    """The tensors that a collective communicates; operators in place also get the outputs."""
    if kind == "barrier":
        return []
    if not in_place:
        return operands
    if kind == "all_gather":
        return [min(operands, key=nbytes)]
    if kind == "reduce_scatter":
        return [max(operands, key=nbytes)]
    return operands[:1] if kind in ("broadcast", "all_reduce") else operands[-1:]


def describe(tensor: Tensor, kind: str) -> str:
    """`float32 [8, 4]`; the first size of an all-to-all is `any`."""
    shape = [str(size) for size in tensor.shape]
    if kind == "all_to_all" and shape:
        shape[0] = "any"  # checked as exchanges
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(shape)}]"


def reduction(args: tuple[Any, ...]) -> str:
    """The reduction that the arguments of a call name; empty for c10d's operators."""
    for arg in args:
        if isinstance(arg, str) and arg in _REDUCTIONS:
            return arg
        if isinstance(arg, dist.ReduceOp | dist.ReduceOp.RedOpType):
            name = str(arg).lower().removeprefix("<").removeprefix("redoptype.")
            return re.sub(r"[^a-z_].*", "", name)
    return ""


def _common_axes(inputs: Iterable[Tensor]) -> frozenset[str]:
    """Axes along which all ranks hold the same values."""
    marks: list[frozenset[str]] = [getattr(x, "_rehearsed", frozenset()) for x in inputs]
    return frozenset.intersection(*marks) if marks else frozenset()


def mark(tensor: Tensor, axes: frozenset[str]) -> None:
    if axes or hasattr(tensor, "_rehearsed"):
        tensor._rehearsed = axes


# ---- operands of an operator


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def group_name(args: tuple[Any, ...]) -> str:
    for arg in reversed(args):
        if isinstance(arg, str) and arg not in _REDUCTIONS:
            return arg
        if isinstance(arg, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(arg).group_name
            except (RuntimeError, TypeError):  # a reduction operator is a ScriptObject too
                continue
    return ""
