"""`config.json` of Hugging Face's decoders, to and from `DecoderArgs`: every key, and the kind of
each layer. Imports no torch.

`HFConfig` has the keys that most classes share; the classes of `windows.py` add keys for layers
with a window. A family subclasses one of them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, PlainSerializer, ValidationError

from torchtitan.config.load.messages import explain_value
from torchtitan.config.types import Layers
from torchtitan.models.args import DecoderArgs, LayerKind, unused
from torchtitan.models.hf.agreement import with_text_config, with_usual_names
from torchtitan.models.hf.blocks import block_names, decoder_names
from torchtitan.models.hf.quantization import check_quantization
from torchtitan.models.hf.rope import Rope, merge_ropes, write_scaling
from torchtitan.models.hf_names import HFNames
from torchtitan.models.spec import HFMap
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import brief


def _number_of_first(layers: Any) -> int:
    layers = [] if layers is None else layers
    if isinstance(layers, list) and all(type(layer) is int for layer in layers):
        count = len(set(layers))
        if set(layers) == set(range(count)):
            return count
    raise ValueError(f"got {brief(layers)}, must be a list of the first layers: 0, 1, ...")


FirstLayers = Annotated[
    int, BeforeValidator(_number_of_first), PlainSerializer(lambda n: list(range(n)))
]
"""Number of first layers, which `config.json` has as a list of their indices, in any order."""


# ---- the kinds of layers


_KIND_OF_TYPE: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "delta",
}
_TYPE_OF_KIND = {kind: name for name, kind in _KIND_OF_TYPE.items()} | {"nope": "full_attention"}


def _read_types(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"got {brief(value)}, must be a list with the type of each layer")
    for name in value:
        if not isinstance(name, str) or name not in _KIND_OF_TYPE:
            types = ", ".join(repr(kind) for kind in _KIND_OF_TYPE)
            raise ValueError(f"got {brief(name)}, must be one of {types}")
    return tuple(_KIND_OF_TYPE[name] for name in value)


LayerTypes = Annotated[tuple[LayerKind, ...] | None, BeforeValidator(_read_types)]
"""`layer_types`: the kind of each layer, or None."""


def all_kinds(args: DecoderArgs) -> list[LayerKind]:
    """The kind of each block."""
    return [args.kind(layer) for layer in range(args.n_layers)]


def layer_type(kind: LayerKind) -> str:
    """Hugging Face's name of a kind. Layers without positions have the name of `full` ones."""
    return _TYPE_OF_KIND[kind]


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that yields these kinds when repeated over the layers."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return tuple(kinds[:period])
    return tuple(kinds)


# ---- the keys


class HFConfig(BaseModel):
    """The keys of a `config.json` that matter to a family, with their defaults in transformers.

    A type with a single value means that the family can represent no other. A hyper-parameter
    without a key has one value in all models of the class: the class attribute of its name, else
    its default.
    """

    model_config = {"strict": True}

    model_type: ClassVar[str]
    also_read: ClassVar[tuple[str, ...]] = ()
    """Other values of `model_type` for the same models."""
    architecture: ClassVar[str]
    """The class of the model in transformers."""
    keys: ClassVar[Mapping[str, str]] = {}
    """Hyper-parameter to its key, where this class has another key than most."""
    qk_norm: ClassVar[bool] = False
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns (`fnmatch`) of tensors in folders of this class that these models don't have."""
    explicit_head_size: ClassVar[bool] = False
    """Whether the size of a head is a separate setting even where it equals `dim / n_heads`."""
    partial_rope: ClassVar[bool] = False
    """Whether RoPE can rotate only some features of each head (`partial_rotary_factor`)."""
    kinds: ClassVar[tuple[LayerKind, ...]] = ("full", "window")
    """The kinds of layers that `layer_types` may have."""
    default_theta: ClassVar[float] = 10_000.0
    """RoPE's base where `config.json` gives none."""
    default_rope: ClassVar[Rope] = Rope()
    """RoPE where `config.json` doesn't mention it."""
    full_every: ClassVar[int] = 1
    """Without `layer_types`, every `full_every`-th layer has full attention, the others a window.
    """

    hidden_act: Literal["silu"] = "silu"
    quantization_config: Annotated[Any, AfterValidator(check_quantization)] = None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: Layers
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    tie_word_embeddings: bool = False

    @classmethod
    def map(cls) -> HFMap:
        return HFMap(
            cls.model_type, cls.names, cls.write, cls.read, cls.fixed, cls.ignored, cls.also_read
        )

    @classmethod
    def names(cls, args: DecoderArgs) -> HFNames:
        """Our parameter names to Hugging Face's."""
        return decoder_names(args, lambda layer: cls.block_names(args, layer))

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        """Names of the weights of one layer, relative to it."""
        return block_names(args, layer)

    @classmethod
    def hyper_parameter_keys(cls) -> dict[str, str]:
        """Hyper-parameter to its key in `config.json`, for those that have one."""
        return {
            ours: theirs
            for ours, theirs in (_KEYS | dict(cls.keys)).items()
            if theirs in cls.model_fields
        }

    @classmethod
    def fixed(cls, args: DecoderArgs) -> dict[str, Any]:
        """Every hyper-parameter, including a subclass's, with the value that transformers uses
        after an export, which differs from ours where `config.json` has no key for it.
        """
        export = cls.read(cls.write(args, "float32"))
        theirs = effective_values(export)
        ours = effective_values(args)
        fixed = {}
        for name, field in type(args).model_fields.items():
            value = getattr(args, name)
            export_value = getattr(export, name, field.default)
            matters = name in theirs or name not in type(export).model_fields
            differs = name in ours and matters and ours[name] != theirs.get(name, export_value)
            fixed[name] = export_value if differs else value
        return fixed

    @classmethod
    def write(cls, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        """`config.json` of the exported model, readable by transformers 4 and 5."""
        # A required key that no hyper-parameter sets can only be null.
        values: dict[str, Any] = {
            name: None for name, field in cls.model_fields.items() if field.is_required()
        }
        values |= {
            theirs: getattr(args, ours) for ours, theirs in cls.hyper_parameter_keys().items()
        }
        values["head_dim"] = args.head_dim
        if not args.n_experts and "num_local_experts" in cls.model_fields:
            # All layers of these classes have experts, so they can't express a dense model.
            values |= {"num_local_experts": 1, "num_experts_per_tok": 1}
        return {
            "architectures": [cls.architecture],
            "model_type": cls.model_type,
            "attention_dropout": 0.0,
            "torch_dtype": dtype,
            **cls.model_construct(None, **values).model_dump(exclude=_READ_ONLY),
            **cls.write_layers(args),
            **cls.write_rope(args),
        }

    @classmethod
    def write_layers(cls, args: DecoderArgs) -> dict[str, Any]:
        """Keys for the differences between layers."""
        keys: dict[str, Any] = {}
        if "layer_types" in cls.model_fields:
            kinds = (kind if kind in cls.kinds else "full" for kind in all_kinds(args))
            keys["layer_types"] = [layer_type(kind) for kind in kinds]
        if "sliding_window" in cls.model_fields:
            keys["sliding_window"] = args.window if "window" in args.kinds else None
            if "layer_types" in keys:  # transformers builds the mask, used or not
                keys["sliding_window"] = args.window or cls.model_fields["sliding_window"].default
        return keys

    @classmethod
    def write_rope(cls, args: DecoderArgs) -> dict[str, Any]:
        """Keys of RoPE other than its base."""
        scaling = write_scaling(args.rope_scaling)
        keys: dict[str, Any] = {"rope_scaling": scaling}
        if cls.default_rope.kind != "default":  # which null would mean
            plain = {"rope_type": "default"}
            keys["rope_parameters"] = (scaling or plain) | {"rope_theta": args.rope_theta}
        if cls.partial_rope:
            keys["partial_rotary_factor"] = args.rope_fraction
        return keys

    @classmethod
    def read(cls, config: dict[str, Any]) -> DecoderArgs:
        """The hyper-parameters in a `config.json` of transformers 4 or 5. A model with a vision
        tower or the like has them in its `text_config`.

        Raises:
            ConfigError: every reason why `DecoderArgs` can't represent the model.
        """
        if (kind := config.get("model_type")) not in (cls.model_type, *cls.also_read):
            raise ConfigError(
                [f"config.json: model_type: got {brief(kind)}, must be {cls.model_type!r}"]
            )
        keys = cls.model_fields.keys()
        try:
            config = with_usual_names(with_text_config(config, keys), keys)
            return DecoderArgs(**cls.model_validate(config).hyper_parameters())
        except ValidationError as error:
            names = _KEYS | dict(cls.keys) | _LAYER_KEYS
            raise ConfigError(
                [f"config.json: {_explain(item, names)}" for item in error.errors()]
            ) from None
        except ValueError as error:
            raise ConfigError([f"config.json: {error}"]) from None

    def hyper_parameters(self) -> dict[str, Any]:
        """Arguments of `DecoderArgs`.

        Raises:
            ValueError: `DecoderArgs` can't represent it. The message names the key.
        """
        fields = DecoderArgs.model_fields
        values = {name: getattr(type(self), name) for name in fields if hasattr(type(self), name)}
        values |= {
            ours: getattr(self, theirs) for ours, theirs in self.hyper_parameter_keys().items()
        }
        if (
            not self.explicit_head_size
            and self.head_dim
            and self.head_dim * self.num_attention_heads == self.hidden_size
        ):
            values["head_size"] = None
        values["n_kv_heads"] = values["n_kv_heads"] or values["n_heads"]
        kinds = self.layer_kinds()
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(
                f"the kinds of {len(kinds)} layers are given, must be of num_hidden_layers "
                f"{self.num_hidden_layers}"
            )
        values["layer_pattern"] = shortest_pattern(kinds)
        values["window"] = None
        if "window" in kinds:
            values["window"] = getattr(self, "sliding_window", None)
            if values["window"] is None:
                raise ValueError("sliding_window is null, but layers have a window; set its size")
        return values | self.ropes()

    def layer_kinds(self) -> Sequence[LayerKind]:
        """The kind of each block.

        Raises:
            ValueError: a kind that the class doesn't have.
        """
        types: Sequence[LayerKind] | None = getattr(self, "layer_types", None)
        if types is None:
            return self.periodic_kinds()
        if foreign := [kind for kind in types if kind not in self.kinds]:
            choices = ", ".join(repr(layer_type(kind)) for kind in self.kinds)
            raise ValueError(
                f"layer_types: got {layer_type(foreign[0])!r}, must be one of {choices}"
            )
        period = "sliding_window_pattern"
        if period in self.model_fields_set and list(types) != list(self.periodic_kinds()):
            every = getattr(self, period)
            raise ValueError(f"layer_types contradicts {period} {every}; remove the wrong one")
        return types

    def periodic_kinds(self) -> Sequence[LayerKind]:
        """The kind of each block without `layer_types`."""
        every = getattr(self, "sliding_window_pattern", self.full_every)
        return ["window" if (i + 1) % every else "full" for i in range(self.num_hidden_layers)]

    def rope(self) -> Rope:
        """RoPE's settings.

        Raises:
            ValueError: two keys contradict each other.
        """
        # transformers ignores an empty rope_scaling
        empty = self.rope_scaling is not None and not self.rope_scaling.model_fields_set
        scaling = None if empty else self.rope_scaling
        ropes = {"rope_scaling": scaling, "rope_parameters": self.rope_parameters}
        if scaling is None and self.rope_parameters is None:
            ropes = {"": self.default_rope}
        names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        return merge_ropes(
            ropes, {name: getattr(self, name) for name in names if name in self.model_fields_set}
        )

    def ropes(self) -> dict[str, Any]:
        """Hyper-parameters of the rotary positions.

        Raises:
            ValueError: the keys contradict each other, or no decoder has such positions.
        """
        rope = self.rope()
        fraction = rope.partial_rotary_factor or self.partial_rotary_factor or 1.0
        if fraction != 1 and not self.partial_rope:
            raise ValueError(f"partial_rotary_factor is {fraction}, must be 1: RoPE of whole heads")
        return {
            "rope_theta": rope.rope_theta or self.default_theta,
            "rope_scaling": rope.scaling(self.max_position_embeddings),
            "rope_fraction": fraction,
        }


# ---- what an export preserves


def effective_values(args: DecoderArgs) -> dict[str, Any]:
    """Hyper-parameter to the value that a model uses, without the hyper-parameters that don't
    matter to it.
    """
    values = {name: getattr(args, name) for name in type(args).model_fields if name != "init_std"}
    values |= {"head_size": args.head_dim, "layer_pattern": all_kinds(args)}
    values["attention_scale"] = args.attention_scale or args.head_dim**-0.5
    values["window_rope_theta"] = args.window_rope_theta or args.rope_theta
    values["scale_window_rope"] = args.scale_window_rope or args.rope_scaling is None
    without_effect = unused(args)
    return {name: value for name, value in values.items() if name not in without_effect}


_KEYS = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
    "n_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "normalize_expert_weights": "norm_topk_prob",
    "n_dense_layers": "mlp_only_layers",
}
"""Our names of hyper-parameters to Hugging Face's."""
_LAYER_KEYS = {"window": "sliding_window", "layer_pattern": "layer_types"}
_READ_ONLY = {
    "quantization_config",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
}


def _explain(item: Any, names: Mapping[str, str]) -> str:
    key = ".".join(names.get(name, str(name)) for name in item["loc"])
    if item["type"] == "missing":
        return f"{key} is missing"
    problem = explain_value(item)
    if not key:  # of values that don't go together
        for ours, theirs in names.items():
            problem = re.sub(rf"\b{ours} (?=\d)", f"{theirs} ", problem)
    return ": ".join(filter(None, (key, problem)))
