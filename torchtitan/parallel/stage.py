"""One stage of a pipeline, which holds what it receives, computes and sends only as long as
something needs it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
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

from torchtitan.models.layers import Mask
from torchtitan.utils.activity import note
from torchtitan.utils.torch_compat import (
    allocate_receive_buffers,
    drop_receive_buffers,
    forget_output,
    forget_what_weights_do_not_need,
    without_receive_buffers,
    without_self_connections,
)


class Sends:
    """The sends of a rank that may not have ended, each with the tensor it sends.

    torch waits for them at the end of the batch (2.15: for those of gradients), so a tensor per
    microbatch and stage stays allocated. Here a send ends when something arrives from the same rank
    by a receive that was posted after it. Waiting for it then costs nothing: torch derives the
    orders of all ranks from one sequence, in which a send stands beside its receive. So the other
    rank posted that receive before it sent what has arrived, and on CUDA both took the same stream.
    """

    def __init__(self) -> None:
        self._pending: dict[int, deque[tuple[int, list[dist.P2POp], list[dist.Work]]]] = (
            defaultdict(deque)
        )
        """By the other rank, in order: number, operations (which hold the tensors), what to wait
        for.
        """
        self._arrivals: dict[tuple[int, str, int], tuple[int, int]] = {}
        """By stage, direction and microbatch of a posted receive: its rank, and the number of the
        next send.
        """
        self._number = 0

    def start(self, operations: list[dist.P2POp]) -> None:
        self._pending[operations[0].peer].append((self._number, operations, _batch_p2p(operations)))
        self._number += 1

    def expect(self, what: tuple[int, str, int], operations: list[dist.P2POp]) -> None:
        """A receive is about to be posted."""
        if operations:
            self._arrivals[what] = operations[0].peer, self._number

    def arrived(self, what: tuple[int, str, int]) -> None:
        """What was expected has arrived. Does nothing for what a stage of the same rank has passed
        on.
        """
        peer, number = self._arrivals.pop(what, (-1, 0))
        self._end(self._pending[peer], number)

    def end(self) -> None:
        """Wait for all that are left."""
        for sends in self._pending.values():
            self._end(sends, self._number)

    def _end(
        self, sends: deque[tuple[int, list[dist.P2POp], list[dist.Work]]], number: int
    ) -> None:
        while sends and sends[0][0] < number:
            for work in sends[0][2]:
                work.wait()
            sends.popleft()


class Masks:
    """The mask of each microbatch, shared by those stages of a rank that have layers: made for the
    first of them that runs, kept until the last.
    """

    def __init__(self, make: Callable[[int], Mask], users: int):
        self._make = make
        self._users = users
        self._made: dict[int, tuple[Mask, int]] = {}

    def of(self, microbatch: int) -> Mask:
        """For the next forward of `microbatch`."""
        if microbatch not in self._made:
            self._made[microbatch] = self._make(microbatch), self._users
        mask, users = self._made.pop(microbatch)
        if users > 1:
            self._made[microbatch] = mask, users - 1
        return mask


class Stage(PipelineStage):
    """Passes its module what every stage needs besides hidden states.

    Not keyword arguments of the schedule: torch 2.11 would compute their gradients.
    """

    positions: Tensor
    project: bool
    masks: Masks | None
    """Shared like `sends`. None: attention sees whole rows."""
    token_weights: Sequence[Tensor] | None = None
    """Of each microbatch, for a mixture of experts."""
    sends: Sends
    """Shared by the stages that a schedule runs on this rank."""
    microbatch: int
    """The one whose forward runs."""

    # ---- computing

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.microbatch = fwd_chunk_id
        note(f"running stage {self.stage_index}, from the forward of microbatch {fwd_chunk_id}")
        if not self.has_backward:
            self.clear_runtime_states()  # what came before has been sent
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            forget_output(self, fwd_chunk_id)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        mask = None if self.masks is None else self.masks.of(self.microbatch)
        own = {
            "positions": self.positions,
            "mask": mask,
            "project": self.project,
        }
        if self.token_weights is not None:
            own["token_weights"] = self.token_weights[self.microbatch]
        return super().forward_maybe_with_nosync(*args, **own, **kwargs)

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
            loss.detach_()  # the schedule keeps it, and it would keep the whole graph
        if not full_backward:
            forget_what_weights_do_not_need(self, bwd_chunk_id)

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
    """Let `sends` carry what the stages of `schedule` send to other ranks."""
    stages = {stage.stage_index: stage for stage in schedule._stages}

    def send(action: _Action, _: Any) -> None:
        stage = stages[action.stage_index]
        microbatch = action.microbatch_index
        forward = action.computation_type is _ComputationType.SEND_F
        sends.start(
            stage.get_fwd_send_ops(microbatch) if forward else stage.get_bwd_send_ops(microbatch)
        )

    # `register_custom_function` takes computations only.
    schedule._comp_type_to_function_map |= {
        _ComputationType.SEND_F: send,
        _ComputationType.SEND_B: send,
    }
    schedule.pipeline_order_with_comms = {
        rank: [
            action for action in order if not action.computation_type.name.startswith("WAIT_SEND")
        ]  # torch 2.15
        for rank, order in schedule.pipeline_order_with_comms.items()
    }
