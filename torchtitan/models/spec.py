"""What the framework knows about a model family, as data, and the registry of families. Imports no
torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ValidationError, model_validator

from torchtitan.config.load.messages import explain_errors
from torchtitan.config.registry import Registry, model_families
from torchtitan.config.sections.types import Section, SeqLen, VocabSize, Width
from torchtitan.utils.errors import ConfigError, did_you_mean
from torchtitan.utils.text import brief

if TYPE_CHECKING:
    from torch import nn


class ModelArgs(BaseModel):
    """Base of a family's hyper-parameters. Strict, so mistakes in `[model.overrides]` are errors;
    immutable.
    """

    model_config = Section.model_config

    vocab_size: VocabSize
    """Rows of the token embedding."""
    dim: Width
    """Width of the hidden states that blocks and pipeline stages pass on."""
    max_seq_len: SeqLen
    """Longest row the model supports. Set from `training.seq_len`, or `validation.seq_len` if that
    is longer.
    """

    @model_validator(mode="before")
    @classmethod
    def _none(cls, values: Any) -> Any:
        """TOML has no null, so an optional value that is unset is written as `"none"`."""
        if not isinstance(values, dict):
            return values
        optional = {
            name
            for name, about in cls.model_fields.items()
            if type(None) in get_args(about.annotation)
        }
        return {
            key: None if key in optional and value == "none" else value
            for key, value in values.items()
        }


@dataclass(frozen=True)
class Init:
    """Initialization of one parameter: `zeros`, `ones`, or `normal` with deviation `std`, truncated
    at three.
    """

    kind: str
    std: float = 0.0


HFNames = dict[str, str | list[str]]
"""Our names of parameters to Hugging Face's; or to the names of several of theirs, in order, of
which ours is a stack along a new first dimension.
"""


@dataclass(frozen=True)
class HFMap:
    """Conversion between a family and its Hugging Face implementation."""

    model_type: str
    """The value of this key in a `config.json` of the family."""
    names: Callable[[Any], HFNames]
    """`names(args)`: the names of every parameter."""
    config: Callable[[Any, str], dict[str, Any]]
    """`config(args, dtype)`: the contents of Hugging Face's `config.json`."""
    args: Callable[[dict[str, Any]], Any]
    """`args(config)`: the hyper-parameters of a `config.json`; ConfigError if this family can't
    represent it.
    """
    fixed: Callable[[Any], dict[str, Any]] = lambda args: {}
    """`fixed(args)`: the hyper-parameters that Hugging Face's class has no setting for, each with
    the only value that the class computes with. A model with another value is not exported.
    """
    build: Callable[..., nn.Module] | None = field(
        default=None,
        init=False,
        compare=False,
    )
    """The `ModelSpec.build` whose models this describes. Set by the first spec that it is given to;
    a copy made by `dataclasses.replace` belongs to none yet.
    """

    def of(self, build: Callable[..., nn.Module]) -> HFMap | None:
        """This map for the models of `build`; None if it was written for other ones."""
        if self.build is build:
            return self
        if self.build is not None:
            return None
        own = replace(self)
        object.__setattr__(own, "build", build)
        return own


ShardingStyle = Literal[
    "embedding",
    "norm",
    "head_norm",
    "gather_sequence",
    "columns",
    "rows",
    "output",
    "router",
    "gate",
    "experts",
]
"""What tensor parallelism does to a module. Between modules, activations are sharded over the
sequence.

    embedding         weight sharded over the vocabulary; output sharded over the sequence
    norm              weight replicated; input and output sharded over the sequence
    head_norm         weight replicated; input and output `[b, s, heads, d]` sharded over the heads
    gather_sequence   the first input is gathered, so the module's linear layers see the whole
    sequence
    columns           linear layer, weight sharded over its outputs
    rows              linear layer, weight sharded over its inputs; output sharded over the sequence
    output            projection to the vocabulary, sharded over it
    router            the second input, a weight for each token, is cut to the rank's part of the
    sequence
    gate              weight replicated; input and output sharded over the sequence
    experts           not tensor-parallel; expert parallelism shards the weights over the experts
"""


@dataclass(frozen=True)
class ModelSpec:
    """A model family: how to build the module for one device, and what is known about it without
    building it.

    `dataclasses.replace(spec, name=..., build=...)` and `register` make a variant of a family. With
    another `build` it has no `hf`, unless it states one: `hf=dataclasses.replace(spec.hf, ...)`.
    """

    name: str
    flavors: Mapping[str, Any]
    """Size, as `model.flavor`, to its hyper-parameters."""
    build: Callable[..., nn.Module]
    """`build(args, attend)`: the module, for one device. `attend` is a
    `torchtitan.models.layers.Attend`.
    """
    init: Callable[[str, Any], Init]
    """`init(fqn, args)`: initialization of the parameter called `fqn`."""
    module_flops: Callable[[Any, int], dict[str, float]]
    """`module_flops(args, seq_len)`: FLOPs per token of each module that a pipeline can put on its
    own stage, in execution order.
    """
    tied_modules: Callable[[Any], Sequence[str]]
    """`tied_modules(args)`: modules that share a weight."""
    tensor_parallel_styles: Mapping[str, ShardingStyle]
    """Module name, with `*` for a layer's index, to its style. Every module with parameters needs
    one.
    """
    tensor_parallel_sizes: Callable[[Any], dict[str, int]]
    """`tensor_parallel_sizes(args)`: the hyper-parameters that the tensor-parallel degree must
    divide.
    """
    tiny: Callable[[Any, int, int], dict[str, Any]]
    """`tiny(args, layers, heads)`: overrides for a small model with the same architecture, for
    `torchtitan parity`. `heads` is a multiple of the tensor-parallel degree.
    """
    hf: HFMap | None
    """The family in transformers. None, also after `build` was replaced: there is no such class."""
    expert_sizes: Callable[[Any], dict[str, int]] = lambda args: {}
    """`expert_sizes(args)`: sizes of the stacked weights of a mixture of experts, by
    hyper-parameter: first the number of experts, which the expert-parallel degree must divide, then
    their widths. Empty for a dense model.
    """

    def __post_init__(self) -> None:
        if self.hf is not None:
            object.__setattr__(self, "hf", self.hf.of(self.build))

    def flops_per_token(self, args: Any, seq_len: int) -> float:
        """FLOPs per token of the model's forward and backward, without recomputation."""
        return sum(self.module_flops(args, seq_len).values())

    def args(self, flavor: str, overrides: Mapping[str, Any], **derived: Any) -> Any:
        """Hyper-parameters of `flavor`, with `[model.overrides]` and then `derived` values applied.

        Raises:
            ConfigError: unknown flavor, unknown or ill-typed override.
        """
        if flavor not in self.flavors:
            choices = ", ".join(self.flavors)
            same = [name for name in self.flavors if name.lower() == flavor.lower()]
            hint = did_you_mean(same[0] if same else flavor, self.flavors)
            raise ConfigError(
                [
                    f"model.flavor: {self.name} has no flavor {brief(flavor)} (it has "
                    f"{choices}){hint}"
                ]
            )
        base = self.flavors[flavor]
        try:
            return type(base).model_validate(base.model_dump() | dict(overrides) | derived)
        except ValidationError as error:
            problems = explain_errors(
                error, type(base), lambda key: f"model.overrides.{key}".rstrip(".")
            )
            raise ConfigError(problems) from None


_families: Registry[ModelSpec] = model_families


def register(spec: ModelSpec) -> ModelSpec:
    """Make a model family available as `model.name`."""
    return _families.add(spec.name, spec)


def get_spec(name: str) -> ModelSpec:
    """The registered or built-in family called `name`.

    Raises:
        ConfigError: no such family.
    """
    if problem := _families.problem(name):
        raise ConfigError([f"model.name: {problem}"])
    if (spec := _families.find(name)) is None:
        importlib.import_module(f"torchtitan.models.{name}")
        spec = _families.find(name)
    assert spec is not None, f"torchtitan.models.{name} must register {name}"
    return spec


def families() -> list[ModelSpec]:
    """The built-in families, then the others that are registered."""
    built_in = sorted(_families.built_in)
    return [get_spec(name) for name in [*built_in, *sorted(_families.registered.keys() - built_in)]]


def spec_of_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The family of a Hugging Face model, from its `config.json`. Built-in ones come first.

    Raises:
        ConfigError: no family is of this type.
    """
    kind = config.get("model_type")
    if kind is None:
        raise ConfigError(["config.json: model_type is missing"])
    specs = families()
    types = [spec.hf.model_type if spec.hf else None for spec in specs]
    if kind in types:
        return specs[types.index(kind)]
    known = ", ".join(sorted({repr(name) for name in types if name}))
    raise ConfigError([f"config.json: model_type: got {brief(kind)}, must be one of {known}"])
