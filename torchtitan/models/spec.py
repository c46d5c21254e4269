"""What the framework knows of a model family, as data; and the registry. Imports no torch."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ValidationError

from torchtitan.config.messages import explain_errors
from torchtitan.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


class ModelArgs(BaseModel):
    """Base of a family's hyper-parameters: strict and immutable, so that `[model.overrides]` is checked."""

    model_config = {"extra": "forbid", "strict": True, "frozen": True, "use_attribute_docstrings": True}

    vocab_size: int
    """Rows of the token embedding."""
    dim: int
    """Width of the hidden states that blocks, and pipeline stages, hand on."""
    max_seq_len: int
    """Longest row the model is built for. Set from `training.seq_len`, or `validation.seq_len` if that is longer."""


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

    def args(self, config: dict[str, Any]) -> Any:
        """The hyper-parameters in a `config.json`; ConfigError where it is of a model that the family isn't."""
        ...


ShardingStyle = Literal["embedding", "norm", "gather_sequence", "columns", "rows", "output"]
"""What tensor parallelism does to a module. Between modules, activations are sharded over the sequence.

    embedding         weight sharded over the vocabulary; the output leaves sharded over the sequence
    norm              weight replicated, input and output sharded over the sequence
    gather_sequence   the first input is gathered: the module's linear layers see the whole sequence
    columns           linear layer, weight sharded over its outputs
    rows              linear layer, weight sharded over its inputs; the output leaves sharded over the sequence
    output            projection to the vocabulary, sharded over it
"""


@dataclass(frozen=True)
class ModelSpec:
    """A model family: how to make the module for one device, and what can be said of it without making it."""

    name: str
    flavors: Mapping[str, Any]
    build: Callable[..., nn.Module]
    """`build(args, attend)`."""
    init: Callable[[str, Any], Init]
    """`init(fqn, args)`: how a parameter starts."""
    module_flops: Callable[[Any, int], dict[str, float]]
    """`module_flops(args, seq_len)`: FLOPs per token of each module that a pipeline may put on a stage of its own,
    in the order in which they run."""
    tied_modules: Callable[[Any], Sequence[str]]
    """`tied_modules(args)`: modules that share a weight."""
    tensor_parallel_styles: Mapping[str, ShardingStyle]
    """Module name, with `*` for a layer's index, to what tensor parallelism does to it."""
    tensor_parallel_sizes: Callable[[Any], dict[str, int]]
    """`tensor_parallel_sizes(args)`: the hyper-parameters that the tensor-parallel degree must divide."""
    tiny: Callable[[Any, int, int], dict[str, Any]]
    """`tiny(args, layers, heads)`: overrides that make the model small, and leave what it computes alone. `heads` is a
    multiple of the tensor-parallel degree."""
    hf: HFMap

    def flops_per_token(self, args: Any, seq_len: int) -> float:
        """FLOPs of the whole model's forward and backward for one token, without recomputation."""
        return sum(self.module_flops(args, seq_len).values())

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


def import_custom(module: str) -> None:
    """Import the module of `experimental.custom_import`, which registers a model family."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            [f"experimental.custom_import: can't import {module!r} ({error}); put its folder on PYTHONPATH"]
        ) from error
