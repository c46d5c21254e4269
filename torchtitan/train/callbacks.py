"""What precedes, follows or watches a step: the base class of callbacks, and their view of a run.

The built-in ones are in `train/built_in.py`, in the order of their calls. A user's follow them:

    from torchtitan.config.registry import callbacks
    from torchtitan.train.callbacks import Callback, Run

    @callbacks.register("loud")
    class Loud(Callback):
        def after_step(self, run, result):
            run.log("loudness", result.loss * 2)

`experimental.custom_import` names the module, and `training.callbacks = ["loud"]` chooses it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.registry import callbacks as registered
from torchtitan.config.sections.schema import Config
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.parallel.agree import from_all
from torchtitan.parallel.collectives import unsharded
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.state import Progress
from torchtitan.train.step import StepResult
from torchtitan.utils.errors import UserError

Reduction = Literal["mean", "sum", "max"]
_REDUCE: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "max": max,
}


class Callback:
    """Base class; override what you need. Every method is called on all ranks at the same moment,
    so it may communicate. An exception ends the run as an error of its rank.
    """

    def on_start(self, run: "Run") -> None:
        """Training is about to begin, from scratch or after `run.progress.step`."""

    def before_update(self, run: "Run") -> None:
        """The gradients of a step are complete, summed over ranks and not yet clipped; no weight
        has changed. With `optimizer.early_step_in_backward` it is called before the backward.
        """

    def after_step(self, run: "Run", result: StepResult) -> None:
        """`run.progress.step` is done. Gradients are freed. Not called for a step that the guard
        rewinds.
        """

    def on_validation(self, run: "Run", results: Sequence[dict[str, Any]]) -> None:
        """A validation is done: name, loss, bits_per_byte and tokens of each set."""

    def on_save(self, run: "Run", step: int) -> None:
        """`step` was saved; with `checkpoint.async_mode`, it is still being written."""

    def on_rewind(self, run: "Run", step: int) -> None:
        """The guard has gone back to the checkpoint of `step`."""

    def on_end(self, run: "Run", reason: str) -> None:
        """Training has ended: `completed`, `preempted`, or an error, after which other ranks may be
        gone: don't communicate then.
        """


class LoggedValues:
    """Values that callbacks log, until the next logged step takes them."""

    def __init__(self, *, gather: bool = False):
        """
        Args:
            gather: the run has callbacks that may log; the same on all ranks.
        """
        self.gather = gather
        self._values: dict[str, tuple[Reduction, list[float | Tensor]]] = {}

    def add(self, name: str, value: float | Tensor, reduce: Reduction) -> None:
        if reduce not in _REDUCE:
            raise UserError(f"run.log({name!r}): reduce is {reduce!r}, not {', '.join(_REDUCE)}")
        known, values = self._values.setdefault(name, (reduce, []))
        if known != reduce:
            raise UserError(f"run.log({name!r}): reduced by {known} before, by {reduce} now")
        values.append(unsharded(value).detach() if isinstance(value, Tensor) else value)

    def take(self) -> dict[str, float]:
        """The values of all ranks and steps since the last call, reduced. Called by all ranks.

        Raises:
            UserError: ranks reduce the same name differently.
        """
        if not self.gather:
            return {}
        own = {
            name: (reduce, [float(value) for value in values])
            for name, (reduce, values) in self._values.items()
        }
        self.clear()
        reductions: dict[str, str] = {}
        merged: dict[str, list[float]] = {}
        for rank, logged in enumerate(from_all(own)):
            for name, (reduce, values) in logged.items():
                if reductions.setdefault(name, reduce) != reduce:
                    raise UserError(
                        f"run.log({name!r}): rank {rank} reduces by {reduce}, others by "
                        f"{reductions[name]}"
                    )
                merged.setdefault(name, []).extend(values)
        return {name: _REDUCE[reductions[name]](values) for name, values in merged.items()}

    def clear(self) -> None:
        self._values = {}


@dataclass(frozen=True)
class Run:
    """What callbacks see of a run. Read it; a change to its objects changes the run."""

    config: Config
    progress: Progress
    """Steps, tokens, skipped updates, first and last loss."""
    models: Sequence[FSDPModule]
    """This rank's pipeline stages; the whole model without a pipeline."""
    optimizer: AnyOptimizer
    mesh: Mesh
    device: torch.device
    experts: ExpertBalance | None
    """Loads of the experts; None for a dense model."""
    logged: LoggedValues = field(repr=False)

    def log(self, name: str, value: float | Tensor, reduce: Reduction = "mean") -> None:
        """Record a metric at the next logged step, in `metrics.jsonl` and trackers.

        Values of all ranks and of all steps since the last logged one become one number. Ranks may
        log different names, such as those of a pipeline stage's layers.

        Args:
            value: a number, or a tensor of one element, which the host doesn't wait for until then.
            reduce: how values are combined; always the same for a name.

        Raises:
            UserError: another reduction was declared for `name`, or none is called `reduce`.
        """
        self.logged.add(name, value, reduce)


class Notify(Protocol):
    """Calls a method of all callbacks, in order."""

    def __call__(self, event: str, *details: Any) -> None: ...


Arrange = Callable[[tuple[Callback, ...]], Sequence[Callback]]
"""Takes the built-in and the user's callbacks, in order, and returns those that a run calls."""


def build_callbacks(config: Config) -> tuple[Callback, ...]:
    """The user's callbacks that `training.callbacks` names, in its order."""
    made = []
    for name in config.training.callbacks:
        make = registered.chosen(name, config.custom)
        assert make is not None, f"{name} is not registered"
        made.append(make())
    return tuple(made)
