"""`ModelSpec`, the description of a model family, and the registry. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError, model_validator

from torchtitan.config.load.messages import explain_errors
from torchtitan.config.registry import Registry, model_families
from torchtitan.config.types import Section, SeqLen, VocabSize, Width
from torchtitan.models.hf_names import HFNames
from torchtitan.utils.errors import ConfigError, did_you_mean
from torchtitan.utils.wording import brief

if TYPE_CHECKING:
    from torchtitan.models.protocols import Model


class ModelArgs(BaseModel):
    """Base of a family's hyper-parameters: immutable, and strict about `[model.overrides]`."""

    model_config = Section.model_config

    vocab_size: VocabSize
    """Rows of the token embedding."""
    dim: Width
    """Width of the hidden states that blocks and pipeline stages pass on."""
    max_seq_len: SeqLen
    """Longest row the model supports: the larger of `training.seq_len` and `validation.seq_len`."""

    @model_validator(mode="before")
    @classmethod
    def _none(cls, values: Any) -> Any:
        """TOML has no null, so an optional value that is unset is written as `"none"`."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        optional = {name for name in fields if type(None) in get_args(fields[name].annotation)}
        unset = {key for key in optional if values.get(key) == "none"}
        return values | dict.fromkeys(unset)


Args = TypeVar("Args", bound=ModelArgs)
"""A family's hyper-parameters."""
Build = Callable[[Args, Any], "Model"]
"""`build(args, attend)`: the model, for one device. `attend` is an `Attend` of
`torchtitan.models.attention.interface`, or None for a model that never runs.
"""


@dataclass(frozen=True)
class Init:
    """Initialization of one parameter."""

    kind: Literal["zeros", "ones", "normal", "log_uniform"]
    std: float = 0.0
    """Standard deviation of `normal`, which is clamped to three of them."""
    low: float = 0.0
    """`log_uniform` is the logarithm of a uniform sample between `low` and `high`. Both are
    computed in fp32, whatever the parameter's type: 16 bits would round small samples to zero.
    """
    high: float = 0.0


def is_matrix(name: str, dims: int) -> bool:
    """Whether the parameter called `name` is a matrix, or a stack of them.

    Matrices get weight decay, and Muon's updates. Stacked biases of experts and the filters of a
    convolution of each channel have two dimensions, but map no vector to another.
    """
    module, _, leaf = name.rpartition(".")
    return dims > 1 and leaf not in ("b1", "b2", "b3") and not module.endswith("_conv")


def matrices(model: Any) -> dict[str, Any]:
    """The matrices of a model, and stacks of them, by name."""
    params = model.named_parameters()
    return {name: param for name, param in params if is_matrix(name, param.dim())}


@dataclass(frozen=True)
class HFMap(Generic[Args]):
    """Conversion between a family and its Hugging Face implementation."""

    model_type: str
    """The value of this key in a `config.json` of the family."""
    names: Callable[[Args], HFNames]
    """`names(args)`: where every parameter is, and every buffer that Hugging Face stores."""
    config: Callable[[Args, str], dict[str, Any]]
    """`config(args, dtype)`: the contents of Hugging Face's `config.json`."""
    args: Callable[[dict[str, Any]], Args]
    """`args(config)`: the hyper-parameters of a `config.json`; ConfigError if this family can't
    represent it.
    """
    fixed: Callable[[Args], dict[str, Any]] = lambda args: {}
    """`fixed(args)`: the hyper-parameters that Hugging Face's class has no setting for, with the
    only value it computes with. A model with another value is not exported.
    """
    ignored: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of tensors in Hugging Face's folders that these models don't have;
    `{n_layers}` stands for that hyper-parameter.
    """
    also_read: tuple[str, ...] = ()
    """Other values of `model_type` in the `config.json` of the same models."""

    def ignores(self, name: str, args: Args) -> bool:
        """Whether a tensor of Hugging Face is one of `ignored`."""
        values = vars(args)
        return any(fnmatchcase(name, pattern.format(**values)) for pattern in self.ignored)


class ShardingStyle(StrEnum):
    """Sharding of a module by tensor parallelism. Between modules, activations are sharded over the
    sequence.
    """

    EMBEDDING = "embedding"
    """The weight is sharded over the vocabulary, the output over the sequence."""
    NORM = "norm"
    """The weight is replicated; input and output are sharded over the sequence."""
    HEAD_NORM = "head_norm"
    """The weight is replicated; input and output `[b, s, heads, d]` are sharded over heads."""
    WHOLE_NORM = "whole_norm"
    """Weight, input and output are sharded over features, whose norm spans ranks."""
    PER_HEAD = "per_head"
    """`PerHead`: the weight is sharded over its first dimension; the rank's part is returned."""
    GATHER_SEQUENCE = "gather_sequence"
    """The first input is gathered, so the module's linear layers see the whole sequence."""
    COLUMNS = "columns"
    """A linear layer, its weight sharded over its outputs."""
    COLUMNS_OF_SEQUENCE = "columns_of_sequence"
    """A linear layer like `COLUMNS`, whose input is sharded over the sequence, and gathered."""
    ROWS = "rows"
    """A linear layer, its weight sharded over its inputs, its output over the sequence."""
    SHARED_KEY = "shared_key"
    """A gathered input; the heads of each rank use a copy."""
    OUTPUT = "output"
    """The projection to the vocabulary, sharded over it."""
    ROUTER = "router"
    """The second input, a weight for each token, is cut to the rank's part of the sequence."""
    GATE = "gate"
    """`TokenLinear`: the weight is replicated; input and output are sharded over the sequence."""
    EXPERTS = "experts"
    """Not tensor-parallel: expert parallelism shards the weights over the experts."""


@dataclass(frozen=True)
class ModelSpec(Generic[Args]):
    """A model family: a function that builds the model for one device, and the facts that need no
    model.

    `register(spec.variant(...))` makes another family of it.
    """

    name: str
    flavors: Mapping[str, Args]
    """Size, as `model.flavor`, to its hyper-parameters."""
    build: Build[Args]
    """`build(args, attend)`: the model, for one device."""
    init: Callable[[str, Args], Init]
    """`init(fqn, args)`: initialization of the parameter called `fqn`."""
    module_flops: Callable[[Args, int], dict[str, float]]
    """`module_flops(args, seq_len)`: FLOPs per token of each module that a pipeline can put on its
    own stage, in execution order.
    """
    tied_modules: Callable[[Args], Sequence[str]]
    """`tied_modules(args)`: modules that share a weight."""
    tensor_parallel_styles: Mapping[str, ShardingStyle]
    """Module name, with `*` for a layer's index, to its style. Every module with parameters needs
    one.
    """
    tensor_parallel_sizes: Callable[[Args], dict[str, int]]
    """`tensor_parallel_sizes(args)`: sizes that the tensor-parallel degree must divide."""
    tiny: Callable[[Args, int, int], dict[str, Any]]
    """`tiny(args, layers, heads)`: overrides for a small model with the same architecture, for
    `torchtitan parity`. `heads` is a multiple of the tensor-parallel degree.
    """
    hf: HFMap[Args] | None
    """The family in transformers. None if no class there computes what the model does."""
    expert_sizes: Callable[[Args], dict[str, int]] = lambda args: {}
    """`expert_sizes(args)`: sizes of the experts' stacked weights by hyper-parameter: the number of
    experts, which the expert-parallel degree must divide, then their widths. Empty without experts.
    """
    context_parallel_sizes: Callable[[Args], dict[str, int]] = lambda args: {}
    """`context_parallel_sizes(args)`: sizes that the context-parallel degree times the
    tensor-parallel degree must divide.
    """

    mtp_modules: Callable[[Args], int] = lambda args: 0
    """`mtp_modules(args)`: how many modules predict further tokens in training. The model then also
    accepts tokens `[b, s, 1 + n]`.
    """

    unused: Callable[[Args], Mapping[str, str]] = lambda args: {}
    """`unused(args)`: hyper-parameters that have no effect on the model, each with what the model
    lacks for them.
    """

    width_ratio: Callable[[str, Args], float] = lambda fqn, args: 1.0
    """`width_ratio(fqn, args)`: how many times wider the inputs of the matrix called `fqn` are than
    in the model whose learning rate and weight decay are configured (muP, Yang et al.,
    arXiv:2203.03466).
    """

    def variant(self, name: str, **changes: Any) -> ModelSpec:
        """A family that differs from this one in the attributes `changes`.

        With another `build` it differs from the class in transformers, so it has no `hf` unless
        `changes` has one.
        """
        if "build" in changes:
            changes = {"hf": None, **changes}
        return replace(self, name=name, **changes)

    def flops_per_token(self, args: Args, seq_len: int) -> float:
        """FLOPs per token of the model's forward and backward, without recomputation."""
        return sum(self.module_flops(args, seq_len).values())

    def args(self, flavor: str, overrides: Mapping[str, Any], **derived: Any) -> Args:
        """Hyper-parameters of `flavor`, with `[model.overrides]` and then `derived` values applied.

        Raises:
            ConfigError: unknown flavor, unknown or ill-typed override.
        """
        if flavor not in self.flavors:
            choices = ", ".join(self.flavors)
            matches = [name for name in self.flavors if name.lower() == flavor.lower()]
            hint = did_you_mean(matches[0] if matches else flavor, self.flavors)
            problem = f"{self.name} has no flavor {brief(flavor)} (it has {choices}){hint}"
            raise ConfigError([f"model.flavor: {problem}"])
        base = self.flavors[flavor]
        kind = type(base)
        try:
            return kind.model_validate(base.model_dump() | dict(overrides) | derived)
        except ValidationError as error:
            problems = explain_errors(error, kind, lambda key: f"model.overrides.{key}".rstrip("."))
            where = f"; {kind.__module__}.{kind.__name__} declares the keys of {self.name}"
            raise ConfigError(
                [
                    problem + where if problem.endswith("unknown key") else problem
                    for problem in problems
                ]
            ) from None


_families: Registry[ModelSpec] = model_families


def register(spec: ModelSpec[Args]) -> ModelSpec[Args]:
    """Make a model family available as `model.name`."""
    return _families.add(spec.name, spec)


def get_spec(name: str) -> ModelSpec:
    """The registered or built-in family called `name`.

    Raises:
        ConfigError: no such family.
    """
    problem = _families.problem(name)
    if problem:
        raise ConfigError([f"model.name: {problem}"])
    spec = _families.find(name)
    if spec is None:
        importlib.import_module(f"torchtitan.models.families.{name}")
        spec = _families.find(name)
    assert spec is not None, f"torchtitan.models.{name} must register {name}"
    return spec


def all_families() -> list[ModelSpec]:
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
    types = set()
    for spec in all_families():
        if spec.hf is None:
            continue
        model_types = (spec.hf.model_type, *spec.hf.also_read)
        if kind in model_types:
            return spec
        types |= {repr(model_type) for model_type in model_types}
    raise ConfigError(
        [
            f"config.json: model_type: got {brief(kind)}, must be one of "
            f"{', '.join(sorted(types))}; docs/reference/models.md has the nearest family of others"
        ]
    )
