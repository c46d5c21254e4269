"""A forward of one microbatch and a backward of another that hide each other's exchanges of rows.

DualPipeV (DeepSeek-V3, arXiv:2412.19437) pairs them, and so may a schedule from a file. Each has a
thread, and one runs at a time: it starts an exchange, hands over, and waits for its rows when it
is back. On the device both use one stream, so what the other has queued computes while rows travel.
All ranks of a group hand over at the same exchanges, so they issue the same collectives in the same
order.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Semaphore
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineContext,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from torch.utils._python_dispatch import _len_torch_dispatch_stack


class _Turns:
    """Which of two computations runs. Not a matter of threads: on CUDA, the backward that one of
    them calls runs on a thread of autograd's.
    """

    def __init__(self) -> None:
        self._running = 0
        self._go = Semaphore(1), Semaphore(0)
        self._ended = [False, False]
        self._failed = False

    def hand_over(self) -> None:
        """Let the other one run, until it hands over or ends."""
        own = self._running
        if not self._ended[1 - own]:
            self._go_on(1 - own)
            self.wait(own)

    def wait(self, number: int) -> None:
        """Wait for the turn of a computation.

        Raises:
            InterruptedError: the other one has failed.
        """
        self._go[number].acquire()
        if self._failed:
            raise InterruptedError("the other microbatch of this rank has failed")

    def end(self, number: int, *, failed: bool) -> None:
        self._ended[number] = True
        self._failed |= failed
        self._go_on(1 - number)

    def _go_on(self, number: int) -> None:
        self._running = number
        self._go[number].release()


_turns: _Turns | None = None
"""None: this rank computes one microbatch after the other."""


def hand_over() -> None:
    """Called when what was started needs time: let the other microbatch of this rank compute."""
    if _turns is not None:
        _turns.hand_over()


@cache
def _thread() -> ThreadPoolExecutor:
    """Kept, because each new thread would start another set of threads for products on the CPU."""
    return ThreadPoolExecutor(1, thread_name_prefix="backward")


def alternate(here: Callable[[], None], there: Callable[[], None]) -> None:
    """Run two functions, which hand over to each other: `here` first, on this thread.

    Raises:
        BaseException: what the first one to fail raised. The other one ends where it waits.
    """
    global _turns
    turns = _Turns()
    errors: list[BaseException] = []
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None

    def run(number: int, function: Callable[[], None]) -> None:
        try:
            turns.wait(number)
            if stream is not None:
                torch.accelerator.set_stream(stream)
            function()
        except BaseException as error:
            errors.append(error)
        turns.end(number, failed=bool(errors))

    _turns = turns
    future = _thread().submit(run, 1, there)
    run(0, here)
    future.result()
    _turns = None
    if errors:
        raise errors[0]


def overlap_exchanges(schedule: _PipelineScheduleRuntime) -> None:
    """Let the pairs of `schedule` hide each other's exchanges."""
    for order in schedule.pipeline_order_with_comms.values():
        parts = [(x,) if overlaps(x) else x.sub_actions or (x,) for x in order]
        order[:] = itertools.chain.from_iterable(parts)
    schedule.register_custom_function(_ComputationType.OVERLAP_F_B, _run_pair)


def overlaps(action: _Action) -> bool:
    """Whether an action is a pair whose exchanges overlap: a forward and a whole backward of two
    stages. FSDP's state allows one computation of a stage at a time.
    """
    parts = action.sub_actions or ()
    kinds = sorted(part.computation_type.name for part in parts)
    apart = len({part.stage_index for part in parts}) == len(parts)
    return apart and kinds == ["FORWARD", "FULL_BACKWARD"]


def _run_pair(pair: _Action, context: _PipelineContext) -> None:
    """What torch does for both actions, in a function that is local to its loop."""
    schedule: Any = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    parts = sorted(pair.sub_actions or (), key=lambda part: part.computation_type.name)
    (i, _, m, _), (j, _, n, _) = parts
    outputs = []

    def forward() -> None:
        schedule._assert_unsharded(stages[i])
        _wait_batch_p2p(schedule.fwd_recv_ops.pop((i, m), []))
        inputs = context.arg_mbs[m], context.kwarg_mbs[m]
        outputs.append(stages[i].forward_one_chunk(m, *inputs, save_forward_output=False))

    def backward() -> None:
        schedule._assert_unsharded(stages[j])
        _wait_batch_p2p(schedule.bwd_recv_ops.pop((j, n), []))
        schedule.backward_counter[j] += 1
        last = schedule.backward_counter[j] == schedule._n_microbatches
        loss = schedule._maybe_get_loss(stages[j], n)
        stages[j].backward_one_chunk(n, loss=loss, full_backward=True, last_backward=last)

    if _len_torch_dispatch_stack():  # a rehearsal's or a planner's, which see one thread only
        forward()
        backward()
    else:
        alternate(forward, backward)
    # Later, because a chunked loss runs a backward of its own, and CUDA has one thread for both.
    schedule._maybe_compute_loss(stages[i], outputs[0], context.target_mbs, m)
    if i + 1 in stages:
        stages[i + 1].set_local_fwd_input(outputs[0], m)
    if j - 1 in stages:
        stages[j - 1].set_local_bwd_input(stages[j].get_local_bwd_output(n), n)
