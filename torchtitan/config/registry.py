"""Registries of the objects that the configuration chooses by name, built in or added by a user's
module. Imports no torch.

    from torchtitan.config.registry import Section, optimizers

    class Keys(Section):
        momentum: float = 0.9
        \"\"\"Decay of the running mean of the gradient.\"\"\"

    @optimizers.register("lion", Keys)
    class Lion(torch.optim.Optimizer):
        def __init__(self, groups, optimizer, keys): ...

`experimental.custom_import` names the module, `optimizer.name = "lion"` chooses what it registers,
and `[custom.lion]` sets `Keys`. `docs/guides/change-one-thing.md` has an example of each kind.
"""

import importlib
import os
import pkgutil
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict

from torchtitan.config.types import Section
from torchtitan.utils.errors import ConfigError, UserError, did_you_mean
from torchtitan.utils.wording import brief, cut

__all__ = [
    "Section",
    "callbacks",
    "data_sources",
    "losses",
    "metric_sinks",
    "optimizers",
    "schedules",
    "tokenizers",
]

T = TypeVar("T")
Make = TypeVar("Make", bound=Callable[..., Any])


class Custom(Section):
    """Keys of the object that `experimental.custom_import` registers as NAME, which declares and
    checks them. `torchtitan config --explain` lists them.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def tables(self) -> dict[str, Any]:
        """Keys by name: as written, then as the registered `Section` once the configuration is
        checked.
        """
        return self.model_extra or {}


@dataclass(frozen=True)
class _Entry(Generic[T]):
    value: T
    keys: type[Section] | None


class Registry(Generic[T]):
    """Values of one key of the configuration: built-in names, and values registered under other
    names.
    """

    def __init__(self, key: str, what: str, built_in: Collection[str] = ()):
        """
        Args:
            key: the key of the configuration that chooses.
            what: its kind of object, for messages.
        """
        self.key = key
        self.what = what
        self.built_in = built_in
        self._entries: dict[str, _Entry[T]] = {}

    @property
    def registered(self) -> dict[str, type[Section] | None]:
        """Registered name to the class of its keys."""
        return {name: entry.keys for name, entry in self._entries.items()}

    def add(self, name: str, value: T, keys: type[Section] | None = None) -> T:
        """Register `value` as `name`, with its own keys in `[custom.NAME]`."""
        self._entries[name] = _Entry(value, keys)
        return value

    def find(self, name: str | None) -> T | None:
        """The value registered as `name`; None if nothing is, or `name` is None."""
        entry = self._entries.get(name or "")
        return entry.value if entry else None

    def problem(self, name: str) -> str | None:
        """Why `name` can't be chosen."""
        names = sorted({*self.built_in, *self._entries})
        if name in names:
            return None
        parts = (other for other in names if other.lower() in name.lower())  # adamw_torch
        near = max(parts, key=len, default=name[:100])
        version = partial(re.sub, r"\d+", "#")  # llama4 is no misspelt llama3
        like = [other for other in names if other == near or version(other) != version(near)]
        return (
            f"no {self.what} {brief(name)}; known: {', '.join(names) or 'none'}; register others "
            f"from a module named by experimental.custom_import{did_you_mean(near, like)}"
        )


class Functions(Registry[Callable[..., Any]]):
    """A registry of functions or classes that make the object of a name. One with keys gets them as
    `keys`.
    """

    def register(self, name: str, keys: type[Section] | None = None) -> Callable[[Make], Make]:
        """Decorate the function or class that makes the object of this name.

        Args:
            keys: declares the keys of the table `[custom.NAME]`.

        Raises:
            ConfigError: the name is taken or illegal.
        """

        def decorate(make: Make) -> Make:
            if problem := self._refusal(name, make):
                raise ConfigError(
                    [f"experimental.custom_import: {self.what} {brief(name)} {problem}"]
                )
            self.add(name, make, keys)
            return make

        return decorate

    def _refusal(self, name: str, make: Callable[..., Any]) -> str | None:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            return "must be named by letters, digits and _, as a table of a TOML file is"
        if "<" in make.__qualname__:
            return (
                f"is {make.__qualname__}; define it at the top level of its module, where worker "
                "processes find it"
            )
        if name in self.built_in:
            return "is built in; choose another name"
        return next(
            (problem for registry in REGISTRIES if (problem := _clash(registry, name, make))), None
        )

    def maker(self, name: str | None, custom: Custom) -> Callable[..., Any] | None:
        """The function registered as `name`, with its keys; None if `name` is built in or None."""
        make = self.find(name)
        if make is None or self.registered[name or ""] is None:
            return make
        return partial(make, keys=custom.tables[name or ""])


def _clash(registry: Registry[Any], name: str, make: Callable[..., Any]) -> str | None:
    """Why `name` isn't free. A reloaded module may register it again. Two kinds can't share
    it, because their keys share a table.
    """
    other = registry.find(name)
    if other is None or (other.__module__, other.__qualname__) == (
        make.__module__,
        make.__qualname__,
    ):
        return None
    return (
        f"is registered twice: by {other.__module__}.{other.__qualname__} as {registry.what} too; "
        "rename one"
    )


optimizers = Functions("optimizer.name", "optimizer", ("Adam", "AdamW", "Muon"))
"""`make(groups, optimizer[, keys])`: a `torch.optim.Optimizer`; see `torchtitan.optim.registered`.
"""
schedules = Functions(
    "lr_scheduler.name", "schedule", ("wsd", "linear", "sqrt", "cosine", "constant")
)
"""`make(lr_scheduler[, keys])`: a `torchtitan.optim.lr_schedule.Shape`."""
losses = Functions("training.loss", "loss", ("cross_entropy",))
"""`make([keys])`: a `torchtitan.optim.loss.RowLoss`."""
data_sources = Functions(
    "training.dataset", "data source", ("demo", "demo_validation", "c4", "c4_test", "c4_validation")
)
"""`make(dataset_path[, keys])`: documents by number, or a stream; see `data.registered`."""
tokenizers = Functions("model.tokenizer", "tokenizer")
"""`make(hf_assets_path[, keys])`: a `torchtitan.data.encode.tokenizer.Tokenizer`."""

TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Built-in tracker, which is also the name of its extra, to the module it imports."""
metric_sinks = Functions("metrics.sinks", "metric sink", ("jsonl", *TRACKER_PACKAGES))
"""`make(dump_folder, start_step[, keys])`: a `torchtitan.telemetry.trackers.Sink`."""

callbacks = Functions("training.callbacks", "callback")
"""`make([keys])`: a `torchtitan.train.callbacks.Callback`."""

_FAMILIES = Path(__file__).parents[1] / "models/families"
model_families: Registry[Any] = Registry(
    "model.name", "model family", {module.name for module in pkgutil.iter_modules([str(_FAMILIES)])}
)
"""Specs of model families; `torchtitan.models.register` adds them. The built-in ones are
files of `models/families/`.
"""

REGISTRIES: tuple[Functions, ...] = (
    optimizers,
    schedules,
    losses,
    data_sources,
    tokenizers,
    metric_sinks,
    callbacks,
)
"""The registries that a user's module adds to, with its own keys."""
CHOICES: tuple[Registry[Any], ...] = (*REGISTRIES, model_families)
"""Everything that a key chooses by name."""


def unknown_dataset(name: str) -> str | None:
    """Why no data set is called `name`; None if one is, or may be on the Hugging Face hub."""
    names = [*data_sources.built_in, *data_sources.registered]
    path = name.partition("@")[0].partition(":")[0]
    if "/" in path or name in names:
        return None
    return (
        f"no dataset {brief(name)}; known: {', '.join(names)}, and any of the Hugging Face hub as "
        '"org/name:config@split"; for local files set '
        f"dataset_path{did_you_mean(name, names, cutoff=0.5)}"
    )


# ---- the user's module


def import_custom(module: str) -> None:
    """Import the module named by `experimental.custom_import`.

    Raises:
        ConfigError: it can't be imported.
    """
    try:
        importlib.import_module(module)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        problem = (
            f"can't import {brief(module)} ({error}{_raised_at(error)}); add its folder to "
            "PYTHONPATH"
        )
        raise ConfigError([f"experimental.custom_import: {problem}"]) from error
    except (Exception, SystemExit) as error:  # the module is the user's: it may raise anything
        text = cut(" ".join(str(error).split()), 200)
        problem = (
            f"importing {brief(module)} failed: {type(error).__name__}: {text}{_raised_at(error)}"
        )
        raise ConfigError([f"experimental.custom_import: {problem}"]) from error


def _raised_at(error: BaseException) -> str:
    """The line of user code that raised `error`, as the end of a message."""
    if isinstance(error, SyntaxError) and error.filename:
        return f", {error.filename}:{error.lineno}"
    python = tuple(
        os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib")
    )
    ours = ("<", __file__)
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
    ]
    frames = [f for f in frames if not f.filename.startswith(python)] or frames
    return f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
