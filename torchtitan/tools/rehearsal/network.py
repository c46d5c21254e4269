"""Stand-ins for torch.distributed's object and point-to-point calls on the fake process group.

Without them, the results would be data that no rank has sent.
"""

import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan.tools.rehearsal.events import Broadcast, Message
from torchtitan.tools.rehearsal.recorder import Recorder, describe, mark, nbytes, reduction
from torchtitan.utils.torch_compat import replaced

_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object")
_MESSAGES = ("isend", "irecv", "send", "recv", "batch_isend_irecv")
_REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "reduce")


class _Work:
    """Replaces `dist.Work` of a send or receive."""

    def __init__(self, recorder: Recorder, post: int):
        self._recorder = recorder
        self._post = post
        self._has_ended = False

    def wait(self, *_: Any) -> bool:
        if not self._has_ended:
            self._recorder.add_wait(self._post)
        self._has_ended = True
        return True

    def is_completed(self) -> bool:
        return self._has_ended


class Network:
    """The calls, each replacing torch's of the same name."""

    def __init__(self, recorder: Recorder, broadcasts: Sequence[Broadcast] | None):
        """
        Args:
            broadcasts: rank 0's, in order; None on rank 0.
        """
        self.recorder = recorder
        self.broadcasts = None if broadcasts is None else list(broadcasts)

    def reducing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a reduction of torch.distributed, so that the recorder gets its kind."""

        @functools.wraps(call)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            self.recorder.reduction = reduction((*args, *kwargs.values())) or "sum"
            return call(*args, **kwargs)

        return reduce

    # ---- objects

    def _object(
        self, op: str, group: ProcessGroup | None, size: int, root: int | None = None
    ) -> None:
        index = None if root is None else dist.get_group_rank(group or dist.group.WORLD, root)
        self.recorder.add_entry(self.recorder.slot(group), op, "object", size, root=index)

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: ProcessGroup | None = None
    ) -> None:
        self._object("all_gather_object", group, _size(obj))
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
        """Keep rank 0's objects; give other ranks the objects of its call at the same line, else of
        its next one in the group.
        """
        record = self.recorder.record
        root = self._global(src, group_src, group)
        size = _size(object_list) if record.rank == root else 0
        self._object("broadcast_object_list", group, size, root)
        slot = self.recorder.slot(group)
        at = self.recorder.at()
        if self.broadcasts is None:
            record.broadcasts.append(Broadcast(slot, at, list(object_list)))
        elif record.rank != root:
            later = [(x.at != at, i) for i, x in enumerate(self.broadcasts) if x.slot == slot]
            if later:
                object_list[:] = self.broadcasts.pop(min(later)[1]).objects

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
    ) -> None:
        self._object("gather_object", group, _size(obj), self._global(dst, group_dst, group))
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def _global(self, rank: int | None, in_group: int | None, group: ProcessGroup | None) -> int:
        if in_group is None:
            return rank or 0
        return dist.get_global_rank(group or dist.group.WORLD, in_group)

    # ---- sends and receives

    def _post(self, operations: list[dist.P2POp], *, pair: bool) -> _Work:
        messages = []
        for operation in operations:
            sends = operation.op is distributed_c10d.isend
            tensor = operation.tensor
            if not sends:
                mark(tensor, frozenset())
            what = describe(tensor, "send")
            messages.append(Message(sends, operation.peer, what, nbytes(tensor)))
        slot = self.recorder.slot(operations[0].group)
        return _Work(self.recorder, self.recorder.add_post(slot, messages, pair=pair))

    def isend(
        self,
        tensor: Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> _Work:
        send = dist.P2POp(distributed_c10d.isend, tensor, dst, group, tag, group_dst)
        return self._post([send], pair=True)

    def irecv(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> _Work:
        receive = dist.P2POp(distributed_c10d.irecv, tensor, src, group, tag, group_src)
        return self._post([receive], pair=True)

    def send(self, *args: Any, **kwargs: Any) -> None:
        self.isend(*args, **kwargs).wait()

    def recv(self, *args: Any, **kwargs: Any) -> None:
        self.irecv(*args, **kwargs).wait()

    def batch_isend_irecv(self, operations: list[dist.P2POp]) -> list[_Work]:
        return [self._post(operations, pair=False)]


def _size(value: object) -> int:
    """Bytes of an object on the network."""
    return len(pickle.dumps(value))


@contextmanager
def recording(recorder: Recorder, broadcasts: Sequence[Broadcast] | None) -> Iterator[None]:
    """Replace and record the functions of torch.distributed that make groups, exchange objects,
    send, receive and reduce: `_OBJECTS`, `_MESSAGES`, `_REDUCTIONS`, and the one function that all
    ways to make a group call.
    """
    network = Network(recorder, broadcasts)
    replacements: dict[str, Callable[..., Any]] = {
        name: getattr(network, name) for name in (*_OBJECTS, *_MESSAGES)
    }
    for name in ("isend", "irecv"):  # compared by identity
        replacements[name] = functools.partial(replacements[name])
    for name in _REDUCTIONS:
        replacements[name] = network.reducing(getattr(dist, name))
    create = _recorded_creation(recorder, distributed_c10d._new_process_group_helper)
    with (
        replaced(dist, **replacements),
        replaced(distributed_c10d, _new_process_group_helper=create, **replacements),
    ):
        yield


def _recorded_creation(recorder: Recorder, create: Callable[..., Any]) -> Callable[..., Any]:
    """torch's creation of a group, which makes a fake group and records it."""

    @functools.wraps(create)
    def create_group(
        size: int,
        rank: int,
        ranks: list[int],
        backend: Any,
        store: Any,
        name: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with _disable_current_modes():
            result = create(size, rank, ranks, "fake", store, name, *args, **kwargs)
        members = tuple(ranks or range(size))
        local_name = name if result[0] is not dist.GroupMember.NON_GROUP_MEMBER else None
        recorder.add_group(members, kwargs.get("group_desc") or "default_pg", local_name)
        return result

    return create_group
