"""The base class of callbacks, which run before and after steps, and their view of a run.

`train/built_in.py` has the built-in callbacks, in the order in which they are called. A user's
callbacks follow all of them except the one that saves:

    from torchtitan.config.registry import callbacks
    from torchtitan.train.callbacks import Callback, Run

    @callbacks.register("loud")
    class Loud(Callback):
        def after_step(self, run, result):
            run.log("loudness", result.grad_norm * 2)

`experimental.custom_import` names the module, and `training.callbacks = ["loud"]` chooses it. Its
state is saved in checkpoints if it defines `state_dict` and `load_state_dict`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from pydantic_core import from_json
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.registry import callbacks as registered
from torchtitan.config.sections.schema import Config
from torchtitan.data.read.streams import check_state
from torchtitan.optim.expert_balance import ExpertBalance
from torchtitan.optim.optimizer import AnyOptimizer
from torchtitan.parallel.agree import from_all
from torchtitan.parallel.collectives import unsharded
from torchtitan.parallel.mesh import Mesh
from torchtitan.train.state import Progress, StepResult
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger

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

    name: str = ""
    """Key of its state in checkpoints. By default the name it is registered under, or its class's
    name.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state that checkpoints hold, for `load_state_dict`. Called after `on_start`, so that
        a state which can't be saved ends the run at once, and with each save.

        It consists of JSON values: dictionaries with strings as keys, lists, strings, finite
        numbers, booleans and None. It should be the same on all ranks: rank 0's is saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` has returned. Called on all ranks, under any
        layout: before `on_start` if the run resumes, before `on_rewind` if it rewinds.
        """

    def on_start(self, run: "Run") -> None:
        """Training is about to begin, from scratch or after `run.progress.step`."""

    def before_update(self, run: "Run") -> None:
        """The gradients of a step are complete, summed over ranks and not yet clipped; no weight
        has changed. With `optimizer.early_step_in_backward` it is called before the backward.
        """

    def after_step(self, run: "Run", result: StepResult) -> None:
        """`run.progress.step` is done, or about to be: the device was given all of it, and reading
        a number of `result` waits. It is not yet saved. Gradients are freed. Not called for a step
        that the guard rewinds.
        """

    def on_validation(self, run: "Run", results: Sequence[dict[str, Any]]) -> None:
        """A validation is done.

        Args:
            results: name, loss, bits_per_byte and tokens of each set.
        """

    def on_save(self, run: "Run", step: int) -> None:
        """`step` was saved; with `checkpoint.async_mode`, it is still being written."""

    def on_rewind(self, run: "Run", step: int) -> None:
        """The guard has gone back to the checkpoint of `step`."""

    def on_end(self, run: "Run", reason: str) -> None:
        """Training has ended: `completed`, `preempted`, or with this rank's error. After an error
        don't communicate: other ranks may have exited.
        """


def overrides(callback: Callback, name: str) -> bool:
    """Whether a callback defines a method, in its class or as an attribute."""
    method = getattr(callback, name)
    return getattr(method, "__func__", method) is not getattr(Callback, name)


class CallbackStates:
    """Saves and loads the states of the callbacks that define `state_dict`, by name."""

    def __init__(self, callbacks: Sequence[Callback]):
        """
        Raises:
            UserError: two of them have the same name.
        """
        self.callbacks: dict[str, Callback] = {}
        for callback in callbacks:
            if overrides(callback, "state_dict"):
                name = callback.name or type(callback).__name__
                if name in self.callbacks:
                    raise UserError(
                        f"training.callbacks: two callbacks with a state are called {name}; set "
                        "the attribute `name` of one of them"
                    )
                self.callbacks[name] = callback

    def state_dict(self) -> dict[str, Any]:
        """All states.

        Raises:
            UserError: a checkpoint couldn't hold a state.
        """
        return {name: _json_copy(name, x.state_dict()) for name, x in self.callbacks.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load each callback's state. Logs callbacks without a state, and states without one."""
        for name, callback in self.callbacks.items():
            if name not in states:
                logger.info(f"callback {name} starts fresh: the checkpoint has no state of it")
                continue
            try:
                callback.load_state_dict(states[name])
            except Exception as error:
                raise RuntimeError(
                    f"callback {name}: load_state_dict failed for the checkpoint's state: {error!r}"
                ) from error
        if names := sorted(states.keys() - self.callbacks.keys()):
            logger.info(
                "The checkpoint also has the state of callbacks that this run doesn't use: "
                f"{', '.join(names)}"
            )


def _json_copy(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a callback's state, as a checkpoint will hold it."""
    check_state(state, "training.callbacks", name)
    text = json.dumps(state, ensure_ascii=False).encode()
    if len(text) > _MOST_BYTES:
        raise UserError(
            f"training.callbacks: the state_dict() of {name!r} has {len(text):,} bytes as JSON, "
            f"more than {_MOST_BYTES:,}; write large data to a separate file, and keep its name "
            "here"
        )
    copy: dict[str, Any] = from_json(text)  # as manifests are read
    return copy


_MOST_BYTES = 2**20
"""Largest state of a callback as JSON; manifests are read whole."""


class LoggedValues:
    """The values that callbacks have logged since the last logged step."""

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
        earlier, values = self._values.setdefault(name, (reduce, []))
        if earlier != reduce:
            raise UserError(f"run.log({name!r}): reduced by {earlier} before, by {reduce} now")
        values.append(unsharded(value).detach() if isinstance(value, Tensor) else value)

    def take(self) -> dict[str, float]:
        """The values of all ranks and steps since the last call, reduced. Called by all ranks.

        Raises:
            UserError: ranks reduce the same name differently.
        """
        if not self.gather:
            return {}
        local_values = {
            name: (reduce, [float(value) for value in values])
            for name, (reduce, values) in self._values.items()
        }
        self.clear()
        reductions: dict[str, str] = {}
        all_values: dict[str, list[float]] = {}
        for rank, logged in enumerate(from_all(local_values)):
            for name, (reduce, values) in logged.items():
                if reductions.setdefault(name, reduce) != reduce:
                    raise UserError(
                        f"run.log({name!r}): rank {rank} reduces by {reduce}, others by "
                        f"{reductions[name]}"
                    )
                all_values.setdefault(name, []).extend(values)
        return {name: _REDUCE[reductions[name]](values) for name, values in all_values.items()}

    def clear(self) -> None:
        self._values = {}


class Run(Protocol):
    """A callback's view of a run. Changing its objects changes the run."""

    @property
    def config(self) -> Config: ...

    @property
    def progress(self) -> Progress:
        """Steps, tokens, skipped updates, losses. `tokens` and what follows wait for the device."""

    @property
    def models(self) -> Sequence[FSDPModule]:
        """This rank's pipeline stages; the whole model without a pipeline."""

    @property
    def optimizer(self) -> AnyOptimizer: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def experts(self) -> ExpertBalance | None:
        """Loads of the experts; None for a dense model."""

    @property
    def stops_early(self) -> bool:
        """Whether the run ends after this step, not its last, because it was asked to stop."""

    def log(self, name: str, value: float | Tensor, reduce: Reduction = "mean") -> None:
        """Record a metric at the next logged step, in `metrics.jsonl` and trackers.

        Values of all ranks and of all steps since the last logged one become one number. Ranks may
        log different names, for example of a pipeline stage's layers.

        Args:
            value: a number, or a tensor of one element, which the host reads only at the logged
                step.
            reduce: how values are combined; always the same for a name.

        Raises:
            UserError: `name` was logged with another reduction, or `reduce` is unknown.
        """


Arrange = Callable[[tuple[Callback, ...]], Sequence[Callback]]
"""A function of all callbacks, in order, that returns the callbacks to call."""


def build_callbacks(config: Config) -> tuple[Callback, ...]:
    """The user's callbacks that `training.callbacks` names, in its order.

    Raises:
        UserError: a registered maker returns something else than a `Callback`.
    """
    callbacks = []
    for name in config.training.callbacks:
        make = registered.maker(name, config.custom)
        assert make is not None, f"{name} is not registered"
        callback = make()
        if not isinstance(callback, Callback):
            raise UserError(
                f"callback {name}: {type(callback).__name__} is no Callback; derive it from "
                "torchtitan.train.callbacks.Callback"
            )
        callback.name = callback.name or name
        callbacks.append(callback)
    return tuple(callbacks)
