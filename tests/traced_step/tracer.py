"""A dispatch mode below DTensor that records allocations, products and collectives of a rank."""

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchtitan.parallel.collectives import local
from torchtitan.tools.rehearsal.recorder import INSIDE, group_name, nbytes, tensors

MAIN = "main"
"""The compute stream."""

_COLLECTIVES = (
    ("reduce_scatter", "reduce_scatter"),
    ("gather", "all_gather"),
    ("reduce", "all_reduce"),
    ("to_all", "all_to_all"),
    ("toall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "receive"),
)
"""Part of an operator's name, and the collective that it is; the first match wins."""


@dataclass
class Block:
    """One allocation."""

    size: int
    stream: str
    part: str


@dataclass
class Counts:
    """Totals of the operations so far."""

    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Keys: (`matmul` or `attention`, dtype)."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Keys: (mesh axis, collective)."""
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def copy(self) -> "Counts":
        return Counts(self.flops.copy(), self.calls.copy(), self.bytes.copy())

    def repeat(self, begin: "Counts", end: "Counts", times: int) -> None:
        """Add what was counted between `begin` and `end` another `times` times."""
        for name in ("flops", "calls", "bytes"):
            own, first, last = (getattr(counts, name) for counts in (self, begin, end))
            own.update({key: times * (last[key] - first[key]) for key in last})


class Tracer(TorchDispatchMode):
    """Records the local operations of a rank under `FakeTensorMode`."""

    def __init__(
        self,
        axes: Mapping[str, Collection[str]],
        *,
        weights: Iterable[tuple[int, ...]],
        vocabulary: Iterable[int],
        eight_bit: Mapping[tuple[int, ...], str],
        cuda: bool,
    ):
        """
        Args:
            axes: mesh axes of each process group's name; of those that share a group, all.
            weights: shapes of gathered weights, which distinguish their gradients from activations.
            vocabulary: widths that logits can have.
            eight_bit: type of 8-bit operands, by the shape of the gathered weight.
            cuda: count the workspaces of CUDA's kernels.
        """
        super().__init__()
        self.axes = axes
        self.weights = set(weights)
        self.vocabulary = set(vocabulary)
        self.eight_bit = eight_bit
        self.cuda = cuda
        self.blocks: list[Block] = []
        self.events: list[tuple[int, bool]] = []
        """(number of the block, whether it is allocated rather than freed), in order."""
        self.counts = Counts()
        self.phase = "model"
        self.stream = MAIN
        self._product: int | None = None
        """Block of the last matrix product in the forward."""
        self._dropped: set[int] = set()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    # ---- memory

    def track(self, tensor: Tensor, part: str) -> None:
        """Count an existing tensor."""
        self._see(local(tensor), part)

    def rename(self, tensors: Iterable[Tensor], part: str) -> set[int]:
        """Change the part of these tensors' blocks, and return the blocks' numbers."""
        found = [self._alive.get(local(tensor).untyped_storage()._cdata) for tensor in tensors]
        numbers = {entry[1] for entry in found if entry}
        for number in numbers:
            self.blocks[number].part = part
        return numbers

    def _see(self, tensor: Tensor, part: str | None = None) -> None:
        if tensor.device.type == "meta":  # a pipeline stage infers the shapes that it will receive
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            number = self._allocate(storage.nbytes(), part or self._part(tensor))

            def freed(_: Any, key: int = key) -> None:
                self._free(self._alive.pop(key)[1])

            self._alive[key] = weakref.ref(storage, freed), number

    def _allocate(self, size: int, part: str) -> int:
        self.blocks.append(Block(size, self.stream, part))
        self.events.append((len(self.blocks) - 1, True))
        return len(self.blocks) - 1

    def _free(self, number: int) -> None:
        if number not in self._dropped:
            self.events.append((number, False))

    def drop_unneeded(self, *hook: Any) -> None:
        """A forward hook of compiled blocks: drop what no gradient needs.

        Checkpointing by operation keeps the last product and its reduction, which are only added to
        the residual stream. A compiler drops them.
        """
        output = self._alive[local(hook[-1]).untyped_storage()._cdata][1]
        for _, number in list(self._alive.values()):
            late = self._product is not None and number >= self._product
            if late and number != output and self.blocks[number].part == "activations":
                self._free(number)
                self._dropped.add(number)
        self._product = None

    def _part(self, tensor: Tensor) -> str:
        if self.phase == "update":
            return "other"
        if self.stream != MAIN:
            return "communication"
        if tensor.dim() > 1 and tensor.shape[-1] in self.vocabulary:
            return "logits"
        if tensor.dim() > 1 and tensor.shape in self.weights and _in_backward():
            return "unsharded"
        return "activations"

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record that FSDP freed or restored a gathered weight in place."""
        key = storage._cdata
        if key not in self._alive:
            return
        reference, number = self._alive[key]
        self.blocks[number].part = "unsharded"
        self._free(number)
        self._alive[key] = reference, self._allocate(size, "unsharded")

    def _workspace(self, size: int) -> None:
        """Record memory that a kernel takes while it runs."""
        self.events.append((self._allocate(size, "activations"), False))

    # ---- operations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace == "torchtitan" and func.name() in INSIDE:
            with self:
                return INSIDE[func.name()](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self._collective(func.namespace, name, args, out)
        elif func._overloadpacket in flop_registry or "_flash_attention" in name:
            self._count_product(func, name, args, kwargs or {}, out)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        if name in ("mm", "addmm") and not _in_backward():
            self._product = self._alive[out.untyped_storage()._cdata][1]
        return out

    def _count_product(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        dtype = str(args[0].dtype).removeprefix("torch.")
        if func.namespace == "torchtitan" and name.startswith("attention"):
            self._count_variant(func, args, dtype)
            return
        if "_flash_attention" not in name:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            shapes = [tuple(x.shape) for x in (*args, out) if isinstance(x, Tensor)]
            kinds = [
                self.eight_bit[s]
                for shape in shapes
                for s in (shape, shape[::-1])
                if s in self.eight_bit
            ]
            self.counts.flops["matmul", kinds[0] if kinds else dtype] += flops
            return
        backward = name.endswith("backward")
        q, k = args[1:3] if backward else args[:2]
        causal = (
            args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False))
        )
        products = 5 if backward else 2  # the backward recomputes the scores
        pairs = q.shape[2] * k.shape[2] / (2 if causal else 1)
        self.counts.flops["attention", dtype] += (
            2 * products * q.shape[0] * q.shape[1] * pairs * q.shape[3]
        )
        if self.cuda and backward:
            # Gradients of queries are summed in fp32; those of keys and values are first computed
            # for every query head.
            repeated = 2 * q.element_size() * q.numel() if q.shape[1] != k.shape[1] else 0
            self._workspace(4 * q.numel() + repeated)

    def _count_variant(self, func: Any, args: tuple[Any, ...], dtype: str) -> None:
        """Count attention with a window, sinks or narrow values.

        Model FLOPs count twice what is visible, and no recomputed scores.
        """
        flops = flop_registry[func._overloadpacket](*args) / 2
        backward = func._overloadpacket.__name__.endswith("backward")
        q, v = (args[1], args[3]) if backward else (args[0], args[2])
        if backward:
            widths = q.shape[-1] + v.shape[-1]
            flops *= (2 * widths + q.shape[-1]) / (2 * widths)  # the scores once more
            if self.cuda:
                self._workspace(4 * q.numel())
        self.counts.flops["attention", dtype] += flops

    def _collective(self, namespace: str, name: str, args: tuple[Any, ...], out: Any) -> None:
        kind = next((kind for text, kind in _COLLECTIVES if text in name), None)
        if kind is None:
            return
        inputs = list(tensors(args))
        outputs = list(tensors(out))
        axis = _axis(self.axes.get(group_name(args), ()), namespace, kind, inputs)
        if kind in ("send", "receive") and (
            inputs[0].numel() == 1 or not inputs[0].is_floating_point()
        ):
            return  # torch before 2.13 tests connections and sends shapes in its first step
        if namespace == "c10d":  # the result is an argument
            size = (
                max(map(nbytes, inputs))
                if kind in ("all_gather", "reduce_scatter")
                else nbytes(inputs[0])
            )
        else:
            size = max(sum(map(nbytes, inputs)), sum(map(nbytes, outputs)))
        self.counts.calls[axis, kind] += 1
        self.counts.bytes[axis, kind] += size
        if namespace == "c10d" and axis in ("fsdp", "efsdp", "dp_replicate"):
            for tensor in inputs:
                found = self._alive.get(tensor.untyped_storage()._cdata)
                if found and self.blocks[found[1]].part == "activations":
                    self.blocks[found[1]].part = "communication"


def _axis(axes: Collection[str], namespace: str, kind: str, inputs: Sequence[Tensor]) -> str:
    """Which of the axes that share a process group a collective is for."""
    if len(axes) < 2:
        return next(iter(axes), "other")
    if kind == "all_to_all":
        # A ring of context parallelism sends flat buffers; experts get rows, and their numbers.
        rows = inputs[0].dim() == 2 or not inputs[0].is_floating_point()
        order: tuple[str, ...] = ("ep", "cp") if rows else ("cp", "ep")
    elif namespace == "c10d":  # FSDP calls c10d itself, the others use functional collectives
        order = ("efsdp", "fsdp")
    else:
        order = ("tp", "fsdp", "efsdp") if kind == "all_reduce" else ("tp", "cp")
    return next((axis for axis in order if axis in axes), "other")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
