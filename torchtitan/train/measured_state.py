"""The memory that the state of training takes on a rank."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from torchtitan.parallel.collectives import storage_of
from torchtitan.telemetry.planned import state_gib
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.engine import Engine
from torchtitan.train.step import StepResult


class MeasureState(Callback):
    """Records once the bytes of rank 0's parameters, gradients and optimizer state on its device.

    Nothing is exchanged: rank 0 also measures the run's memory, and a plan knows it as the first
    pipeline rank. Of shards of unequal size, it has the largest.
    """

    def __init__(self, engine: Engine):
        self.run_record = engine.telemetry.run_record
        self.average = engine.components.average
        self.due = dist.get_rank() == 0
        self.gradients = 0
        """Bytes of the gradients of this step, which the update frees."""
        self.gib: dict[str, float] = {}
        """The result; empty before the first update, and on other ranks."""

    def before_update(self, run: Run) -> None:
        if self.due:
            grads = [p.grad for model in run.models for p in model.parameters()]
            self.gradients = _bytes((grad for grad in grads if grad is not None), run)

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self.due or not result.updated:
            return
        self.due = False
        state = [value for values in run.optimizer.state.values() for value in values.values()]
        state += self.average.tensors.values() if self.average else []
        measured = {
            "parameters": _bytes((p for model in run.models for p in model.parameters()), run),
            "gradients": self.gradients,
            "optimizer": _bytes((value for value in state if isinstance(value, Tensor)), run),
        }
        self.run_record.record("state_bytes", measured)
        self.gib = state_gib(measured)


def _bytes(tensors: Iterable[Tensor], run: Run) -> int:
    """Bytes of this rank's shards that are on its device, not offloaded."""
    shards = map(storage_of, tensors)
    return sum(s.numel() * s.element_size() for s in shards if s.device.type == run.device.type)
