"""A stage of a pipeline, which keeps tensors only as long as something needs them."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _batch_p2p,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from torchtitan.models.attention.interface import Mask
from torchtitan.utils.activity import note
from torchtitan.utils.distributed_compat import (
    allocate_receive_buffers,
    drop_receive_buffers,
    forget_output,
    forget_what_weights_do_not_need,
    lay_out_gradients,
    without_receive_buffers,
    without_self_connections,
)


@dataclass
class _Send:
    number: int
    operations: list[dist.P2POp]
    """The operations, which keep the sent tensors alive."""
    works: list[dist.Work]


Arrival = tuple[int, str, int]
"""Something that a stage receives: stage, direction, microbatch."""


class Sends:
    """A rank's sends in flight, each with the tensor it sends.

    torch waits for sends only at the end of the batch (2.15: for sends of gradients), so a tensor
    per microbatch and stage stays allocated. Here a send ends when something arrives from the same
    rank by a receive that was posted later. Waiting for the send then costs nothing: torch derives
    the orders of all ranks from one sequence, in which a send stands beside its receive. So the
    other rank posted the matching receive before it sent what has arrived, and on CUDA both use the
    same stream.
    """

    def __init__(self) -> None:
        self._pending: dict[int, deque[_Send]] = defaultdict(deque)
        """The sends to each rank, in order."""
        self._expected: dict[Arrival, tuple[int, int]] = {}
        """Posted receives: the rank each comes from, and the number of the next send."""
        self._number = 0

    def start(self, operations: list[dist.P2POp]) -> None:
        send = _Send(self._number, operations, _batch_p2p(operations))
        self._pending[operations[0].peer].append(send)
        self._number += 1

    def expect(self, what: Arrival, operations: list[dist.P2POp]) -> None:
        """A receive is about to be posted."""
        if operations:
            self._expected[what] = (operations[0].peer, self._number)

    def arrived(self, what: Arrival) -> None:
        """An expected receive has arrived. Does nothing for tensors from stages of this rank."""
        if what in self._expected:
            peer, number = self._expected.pop(what)
            self._end(self._pending[peer], number)

    def end(self) -> None:
        """Wait for all sends in flight."""
        for sends in self._pending.values():
            self._end(sends, self._number)

    def _end(self, sends: deque[_Send], number: int) -> None:
        while sends and sends[0].number < number:
            for work in sends[0].works:
                work.wait()
            sends.popleft()


class Masks:
    """The mask of each microbatch, shared by the stages of a rank that have layers.

    It is computed for the first stage that runs, and kept until the last.
    """

    def __init__(self, make: Callable[[int], Mask], users: int):
        self._make = make
        self._users = users
        self._masks: dict[int, tuple[Mask, int]] = {}
        """For each microbatch its mask, and the number of stages that will still use it."""

    def of(self, microbatch: int) -> Mask:
        """The mask for the next forward of `microbatch`."""
        entry = self._masks.pop(microbatch, None)
        mask, users = entry or (self._make(microbatch), self._users)
        if users > 1:
            self._masks[microbatch] = (mask, users - 1)
        return mask


class Stage(PipelineStage):
    """A pipeline stage that also passes its module positions, mask and token weights.

    They aren't keyword arguments of the schedule, because torch 2.11 would compute their gradients.
    """

    positions: Tensor
    project: bool
    masks: Masks | None
    """Shared by the stages that a schedule runs on this rank. None: attention sees whole rows."""
    token_weights: Sequence[Tensor] | None = None
    """Weights of each microbatch's tokens, for a mixture of experts."""
    sends: Sends
    """Shared like `masks`."""
    microbatch: int
    """The microbatch whose forward runs."""

    # ---- computing

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.microbatch = fwd_chunk_id
        note(f"running stage {self.stage_index}, from the forward of microbatch {fwd_chunk_id}")
        if not self.has_backward:
            self.clear_runtime_states()  # earlier outputs have been sent
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            forget_output(self, fwd_chunk_id)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        options = {
            "positions": self.positions,
            "mask": None if self.masks is None else self.masks.of(self.microbatch),
            "project": self.project,
        }
        if self.token_weights is not None:
            options["token_weights"] = self.token_weights[self.microbatch]
        return super().forward_maybe_with_nosync(*args, **options, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        note(f"running stage {self.stage_index}, from the backward of microbatch {bwd_chunk_id}")
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # the schedule keeps the loss, which would keep the whole graph
        if not full_backward:
            forget_what_weights_do_not_need(self, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        lay_out_gradients(self.submod.parameters())

    # ---- communicating

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with without_receive_buffers():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with without_receive_buffers():
            return super()._prepare_backward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        allocate_receive_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        self.sends.expect((self.stage_index, "forward", fwd_chunk_id), operations)
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        allocate_receive_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        operations = super().get_bwd_recv_ops(bwd_chunk_id)
        self.sends.expect((self.stage_index, "backward", bwd_chunk_id), operations)
        return operations

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        activations = super()._retrieve_recv_activations(fwd_chunk_id)
        drop_receive_buffers(self.args_recv_info[fwd_chunk_id])
        self.sends.arrived((self.stage_index, "forward", fwd_chunk_id))
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        gradients = super()._retrieve_recv_grads(bwd_chunk_id)
        drop_receive_buffers(self.grad_recv_info[bwd_chunk_id])
        self.sends.arrived((self.stage_index, "backward", bwd_chunk_id))
        return gradients

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return without_self_connections(super()._get_init_p2p_neighbors_ops(), self.group_rank)


def send_through(schedule: _PipelineScheduleRuntime, sends: Sends) -> None:
    """Route what the stages of `schedule` send to other ranks through `sends`."""
    stages = {stage.stage_index: stage for stage in schedule._stages}

    def send(action: _Action, _: object) -> None:
        stage = stages[action.stage_index]
        forward = action.computation_type is _ComputationType.SEND_F
        operations = stage.get_fwd_send_ops if forward else stage.get_bwd_send_ops
        sends.start(operations(action.microbatch_index))

    # `register_custom_function` accepts only computations.
    schedule._comp_type_to_function_map |= {
        _ComputationType.SEND_F: send,
        _ComputationType.SEND_B: send,
    }
    for order in schedule.pipeline_order_with_comms.values():
        # torch 2.15 has separate actions that wait.
        order[:] = [x for x in order if not x.computation_type.name.startswith("WAIT_SEND")]
