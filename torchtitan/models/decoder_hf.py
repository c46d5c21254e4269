"""Conversion to and from the decoders of Hugging Face's transformers. Their RoPE layout is ours, so
no weight is permuted.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, PlainSerializer, ValidationError

from torchtitan.config.load.messages import explain_value
from torchtitan.models.decoder_args import DecoderArgs
from torchtitan.models.hf_names import HFNames
from torchtitan.models.hf_rope import Rope, write_scaling
from torchtitan.models.quantization import check_quantization
from torchtitan.models.spec import HFMap
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.text import brief

_TOP = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_ATTENTION = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_BIASES = {f"attention.w{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_QK_NORMS = {
    f"attention.{norm}.weight": f"self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")
}
_SWIGLU = {
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_FEED_FORWARD = {
    f"feed_forward.{ours}.weight": f"mlp.{theirs}.weight" for ours, theirs in _SWIGLU.items()
}
_ROUTER = {"moe.router.gate.weight": "mlp.gate.weight"}


def names(args: DecoderArgs) -> HFNames:
    """Our parameter names to Hugging Face's. A tied model has neither `output.weight` nor
    `lm_head.weight`.
    """
    found: HFNames = dict(_TOP)
    for i in range(args.n_layers):
        block = dict(_ATTENTION)
        block |= _BIASES if args.qkv_bias else {}
        block |= _QK_NORMS if args.qk_norm else {}
        block |= _ROUTER if args.has_experts(i) else _FEED_FORWARD
        place = f"model.layers.{i}"
        found |= {f"layers.{i}.{ours}": f"{place}.{theirs}" for ours, theirs in block.items()}
        if args.has_experts(i):
            for ours, theirs in _SWIGLU.items():
                parts = [f"{place}.mlp.experts.{e}.{theirs}.weight" for e in range(args.n_experts)]
                found[f"layers.{i}.moe.experts.{ours}"] = parts
    return found if args.tie_embeddings else found | {"output.weight": "lm_head.weight"}


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
"""How many of the first layers are in a list of indices, in any order, which may hold no others."""


class HFConfig(BaseModel):
    """The keys of a `config.json` that matter to a family, with their defaults in transformers.

    A type with a single value means that the family can represent no other. A hyper-parameter
    without a key has one value in all models of the class: that of the attribute of its name here,
    else its default.
    """

    model_config = {"strict": True}

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """The class of the model in transformers."""
    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns (`fnmatch`) of tensors in folders of this class that these models don't have."""
    own_head_size: ClassVar[bool] = False
    """Whether the size of a head is its own setting even where it equals `dim / n_heads`."""
    rotates_parts: ClassVar[bool] = False
    """Whether RoPE can be of a part of each head."""

    hidden_act: Literal["silu"] = "silu"
    quantization_config: Annotated[Any, AfterValidator(check_quantization)] = None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False

    @classmethod
    def map(cls) -> HFMap:
        return HFMap(cls.model_type, names, cls.write, cls.read, cls.fixed, cls.ignored)

    @classmethod
    def fixed(cls, args: DecoderArgs) -> dict[str, Any]:
        """The hyper-parameters that `config.json` has no key for, also those of a subclass, and the
        value of each.
        """
        keys = (
            {ours for ours, theirs in _KEYS.items() if theirs in cls.model_fields}
            | {"rope_scaling"}
            | ({"rope_fraction"} if cls.rotates_parts else set())
        )
        if "n_experts" not in keys:
            keys |= _OF_EXPERTS
        fields = type(args).model_fields
        return {
            name: getattr(cls, name, about.default)
            for name, about in fields.items()
            if name not in keys
        }

    @classmethod
    def write(cls, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        """`config.json` of the exported model, readable by transformers 4 and 5."""
        # What is required and no hyper-parameter can only be null.
        values: dict[str, Any] = {
            name: None for name, field in cls.model_fields.items() if field.is_required()
        }
        values |= {
            theirs: getattr(args, ours)
            for ours, theirs in _KEYS.items()
            if theirs in cls.model_fields
        }
        values["head_dim"] = args.head_dim
        return {
            "architectures": [cls.architecture],
            "model_type": cls.model_type,
            "attention_dropout": 0.0,
            "torch_dtype": dtype,
            **cls.model_construct(None, **values).model_dump(exclude=_READ_ONLY),
            "rope_scaling": write_scaling(args.rope_scaling),
        }

    @classmethod
    def read(cls, config: dict[str, Any]) -> DecoderArgs:
        """The hyper-parameters in a `config.json` of transformers 4 or 5.

        Raises:
            ConfigError: every reason why `DecoderArgs` can't represent the model.
        """
        if (kind := config.get("model_type")) != cls.model_type:
            raise ConfigError(
                [f"config.json: model_type: got {brief(kind)}, must be {cls.model_type!r}"]
            )
        try:
            return DecoderArgs(**cls.model_validate(config).hyper_parameters())
        except ValidationError as error:
            raise ConfigError(
                [f"config.json: {_explain(item)}" for item in error.errors()]
            ) from None
        except ValueError as error:
            raise ConfigError([f"config.json: {error}"]) from None

    def hyper_parameters(self) -> dict[str, Any]:
        rope = self.rope_scaling or self.rope_parameters or Rope()
        fraction = rope.partial_rotary_factor or self.partial_rotary_factor or 1.0
        if fraction != 1 and not self.rotates_parts:
            raise ValueError(f"partial_rotary_factor is {fraction}, must be 1: RoPE of whole heads")
        values = {
            ours: getattr(self, theirs)
            for ours, theirs in _KEYS.items()
            if theirs in type(self).model_fields
        }
        if (
            not self.own_head_size
            and self.head_dim
            and self.head_dim * self.num_attention_heads == self.hidden_size
        ):
            values["head_size"] = None
        values["n_kv_heads"] = values["n_kv_heads"] or values["n_heads"]
        values["rope_theta"] = rope.rope_theta or self.rope_theta or 10_000.0
        values |= {
            "rope_scaling": rope.scaling(self.max_position_embeddings),
            "rope_fraction": fraction,
        }
        fields = DecoderArgs.model_fields
        constant = {name: getattr(type(self), name) for name in fields if hasattr(type(self), name)}
        return constant | values


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
_OF_EXPERTS = {"experts_per_token", "expert_dim", "normalize_expert_weights", "n_dense_layers"}
"""Hyper-parameters that matter only where `n_experts` isn't 0."""
_READ_ONLY = {
    "quantization_config",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "layer_types",
}


def _explain(item: Any) -> str:
    key = ".".join(_KEYS.get(part, str(part)) for part in item["loc"])
    if item["type"] == "missing":
        return f"{key} is missing"
    return ": ".join(filter(None, (key, explain_value(item))))
