"""What the framework knows of a model family, as data; and the registry. Imports no torch."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ValidationError

from torchtitan.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


class ModelArgs(BaseModel):
    """Base of a family's hyper-parameters: strict and immutable, so that `[model.overrides]` is checked."""

    model_config = {"extra": "forbid", "strict": True, "frozen": True, "use_attribute_docstrings": True}

    vocab_size: int
    """Rows of the token embedding."""
    max_seq_len: int
    """Longest row the model is built for. Set from `training.seq_len`."""


@dataclass(frozen=True)
class Init:
    """How one parameter starts: `ones`, or normal with this standard deviation, cut off at three of them."""

    kind: str
    std: float = 0.0


class HFMap(Protocol):
    """A family's correspondence to its Hugging Face implementation."""

    def names(self, args: Any) -> dict[str, str]:
        """Our parameter name to Hugging Face's, complete."""
        ...

    def config(self, args: Any, dtype: str) -> dict[str, Any]:
        """The contents of Hugging Face's `config.json`."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """A model family.

    `build(args, attend)` makes the module for one device; the other members are functions of the arguments alone.
    """

    name: str
    flavors: Mapping[str, Any]
    build: Callable[..., nn.Module]
    init: Callable[[str, Any], Init]
    flops_per_token: Callable[[Any, int], float]
    hf: HFMap

    def args(self, flavor: str, overrides: Mapping[str, Any], **derived: Any) -> Any:
        """Arguments of `flavor` with `[model.overrides]` applied, and `derived` values on top.

        Raises:
            ConfigError: unknown flavor, unknown or ill-typed override.
        """
        if flavor not in self.flavors:
            choices = ", ".join(self.flavors)
            near = [f for f in self.flavors if f.lower() == flavor.lower()] or difflib.get_close_matches(
                flavor, self.flavors, 1
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError([f"model.flavor: {self.name} has no flavor {flavor!r} (it has {choices}){hint}"])
        base = self.flavors[flavor]
        try:
            return type(base).model_validate(base.model_dump() | dict(overrides) | derived)
        except ValidationError as error:
            from torchtitan.config.load import explain_errors

            raise ConfigError(explain_errors(error, type(base), lambda key: f"model.overrides.{key}")) from None


_BUILT_IN = {"llama3": "torchtitan.models.llama3"}
_registry: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> ModelSpec:
    """Make a model family available as `model.name`."""
    _registry[spec.name] = spec
    return spec


def get_spec(name: str) -> ModelSpec:
    """The family called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in _registry and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _registry:
        known = ", ".join(sorted(_BUILT_IN.keys() | _registry.keys()))
        raise ConfigError([f"model.name: no model family {name!r}; known: {known} (experimental.custom_import adds)"])
    return _registry[name]
