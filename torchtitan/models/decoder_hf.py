"""Conversion to and from the decoders of Hugging Face's transformers. Their RoPE layout is ours, so no weight is
permuted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from torchtitan.config.messages import explain_value
from torchtitan.models.decoder_args import DecoderArgs, RopeScaling
from torchtitan.models.spec import HFMap
from torchtitan.utils.errors import ConfigError

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
_QK_NORMS = {f"attention.{norm}.weight": f"self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")}
_SWIGLU = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FEED_FORWARD = {f"feed_forward.{ours}.weight": f"mlp.{theirs}.weight" for ours, theirs in _SWIGLU.items()}


def names(args: DecoderArgs) -> dict[str, str | list[str]]:
    """Our parameter names to Hugging Face's. A tied model has neither `output.weight` nor `lm_head.weight`."""
    found: dict[str, str | list[str]] = dict(_TOP)
    for i in range(args.n_layers):
        block: dict[str, str | list[str]] = {**_ATTENTION}
        block |= _BIASES if args.qkv_bias else {}
        block |= _QK_NORMS if args.qk_norm else {}
        block |= _experts(args) if args.has_experts(i) else _FEED_FORWARD
        place = f"model.layers.{i}."
        for ours, theirs in block.items():
            is_one = isinstance(theirs, str)
            found[f"layers.{i}.{ours}"] = place + theirs if is_one else [place + part for part in theirs]
    return found if args.tie_embeddings else found | {"output.weight": "lm_head.weight"}


def _experts(args: DecoderArgs) -> dict[str, str | list[str]]:
    """A router and experts, which are one tensor each on their side and a stack on ours."""
    stacks = {
        f"moe.experts.{ours}": [f"mlp.experts.{i}.{theirs}.weight" for i in range(args.n_experts)]
        for ours, theirs in _SWIGLU.items()
    }
    return {"moe.router.gate.weight": "mlp.gate.weight", **stacks}


class Rope(BaseModel):
    """RoPE in a `config.json`. The names of some keys differ between versions of transformers."""

    model_config = {"strict": True}

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def scaling(self) -> RopeScaling | None:
        kind = self.rope_type or self.type or "default"
        if kind == "default":
            return None
        if kind != "llama3":
            raise ValueError(f"RoPE scaling of type {kind[:40]!r}, must be 'llama3' or none")
        values = self.factor, self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        if None in values:
            raise ValueError("RoPE scaling of type 'llama3' lacks some of its factors")
        return RopeScaling.model_validate(dict(zip(RopeScaling.model_fields, values, strict=True)))


class HFConfig(BaseModel):
    """The keys of a `config.json` that matter to a family, and their defaults in transformers.

    A literal is the only value that the family can represent.
    """

    model_config = {"strict": True}

    hidden_act: Literal["silu"] = "silu"
    quantization_config: None = None
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
    tie_word_embeddings: bool = False

    def own(self) -> dict[str, Any]:
        """Hyper-parameters that not every family has."""
        return {}


_KEYS = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
}
"""Our names of hyper-parameters to Hugging Face's."""


@dataclass(frozen=True)
class HFFormat:
    """A decoder of transformers."""

    architecture: str
    config: type[HFConfig]
    """Has a field `model_type` with a single legal value."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its `config.json` that are the same for all sizes."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Its own keys, and the hyper-parameters that they hold."""

    def map(self) -> HFMap:
        return HFMap(names, self.write, self.read)

    @property
    def model_type(self) -> str:
        (name,) = self.config.model_fields["model_type"].annotation.__args__
        return name

    def write(self, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        """`config.json` of the exported model, readable by transformers 4 and 5."""
        scaling = args.rope_scaling and {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
        }
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "attention_dropout": 0.0,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            **{theirs: getattr(args, ours) for ours, theirs in _KEYS.items()},
            "rope_scaling": scaling,
            "torch_dtype": dtype,
            **self.constants,
            **{theirs: getattr(args, ours) for theirs, ours in self.own.items()},
        }

    def read(self, config: dict[str, Any]) -> DecoderArgs:
        """The hyper-parameters in a `config.json` of transformers 4 or 5.

        Raises:
            ConfigError: every reason why `DecoderArgs` can't represent the model.
        """
        try:
            found = self.config.model_validate(config)
            rope = found.rope_parameters or found.rope_scaling or Rope()
            values = {ours: getattr(found, theirs) for ours, theirs in _KEYS.items()}
            values["n_kv_heads"] = found.num_key_value_heads or found.num_attention_heads
            values["rope_theta"] = rope.rope_theta or found.rope_theta or 10_000.0
            if found.head_dim is not None and found.head_dim * found.num_attention_heads != found.hidden_size:
                values["head_size"] = found.head_dim
            own = {ours: getattr(found, theirs) for theirs, ours in self.own.items()}
            return DecoderArgs(**values | own | found.own(), rope_scaling=rope.scaling())
        except ValidationError as error:
            raise ConfigError([f"config.json: {_explain(item)}" for item in error.errors()]) from None
        except ValueError as error:
            raise ConfigError([f"config.json: {error}"]) from None


def _explain(item: Any) -> str:
    key = ".".join(_KEYS.get(part, str(part)) for part in item["loc"])
    if item["type"] == "missing":
        return f"{key} is missing"
    return ": ".join(filter(None, (key, explain_value(item))))
