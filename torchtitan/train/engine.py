"""The engine: the objects that train, from the mesh to the callbacks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.sections.schema import Config
from torchtitan.data.loader import StepLoader
from torchtitan.optim.ema import WeightAverage
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.lr_schedule import LRSchedule
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.optim.qk_clip import QKClip
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.callbacks import Callback, LoggedValues, Reduction, overrides
from torchtitan.train.forward import Compute
from torchtitan.train.logits import Probe
from torchtitan.train.preflight import Setup
from torchtitan.train.state import Progress
from torchtitan.train.validation import Validator
from torchtitan.utils.activity import current, phase


@dataclass
class Engine:
    """The objects that train. Callbacks see it as a `Run`.

    They are built once, except `compute`, which is rebuilt when a stage of the data changes the
    shape of rows.
    """

    config: Config
    setup: Setup
    mesh: Mesh
    device: torch.device
    models: list[FSDPModule]
    """This rank's pipeline stages; the whole model without a pipeline."""
    optimizer: AnyOptimizer
    schedule: LRSchedule
    loader: StepLoader
    compute: Compute
    validation: Validator | None = None
    experts: ExpertBalance | None = None
    """None for a dense model."""
    average: WeightAverage | None = None
    """The average of the weights; None without `ema.enable`."""
    probe: Probe | None = None
    """None unless the run evaluates or writes samples."""
    qk_clip: QKClip | None = None
    """None without `optimizer.qk_clip`."""
    stage: int = 0
    """The stage of the data whose rows `compute` expects."""
    build_stage_compute: Callable[[int], Compute] | None = None
    """Builds `compute` for a stage of the data; None: there is only one stage."""

    stops: bool = False
    """Whether the ranks have agreed to stop."""
    progress: Progress = field(default_factory=Progress)
    logged: LoggedValues = field(default_factory=LoggedValues)
    callbacks: Sequence[Callback] = ()
    """All callbacks, in the order in which they are called."""

    @property
    def stops_early(self) -> bool:
        """Whether the run ends before its last step, because it was asked to stop."""
        return self.stops and self.progress.step < self.config.training.steps

    def enter_stage(self, stage: int) -> None:
        """Prepare for the rows of a stage of the data. Does nothing if it is the current one."""
        if stage != self.stage and self.build_stage_compute is not None:
            self.compute = self.build_stage_compute(stage)
        self.stage = stage

    def notify(self, event: str, *details: Any) -> None:
        """Call a method of all callbacks, in order."""
        for callback in self.callbacks:
            if overrides(callback, event):
                with phase(current().kind, f"calling {event} of {type(callback).__name__}"):
                    getattr(callback, event)(self, *details)

    def log(self, name: str, value: float | Tensor, reduce: Reduction = "mean") -> None:
        self.logged.add(name, value, reduce)
