"""Conversion to and from Hugging Face's Llama. Its RoPE layout is ours, so no weight is permuted."""

from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from torchtitan.config.messages import explain_value
from torchtitan.models.llama3.args import LlamaArgs, RopeScaling
from torchtitan.utils.errors import ConfigError

_TOP = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def names(args: LlamaArgs) -> dict[str, str]:
    """Our parameter names to Hugging Face's. A tied model has neither `output.weight` nor `lm_head.weight`."""
    output = {} if args.tie_embeddings else {"output.weight": "lm_head.weight"}
    blocks = {
        f"layers.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
        for i in range(args.n_layers)
        for ours, theirs in _BLOCK.items()
    }
    return _TOP | blocks | output


def config(args: LlamaArgs, dtype: str) -> dict[str, Any]:
    """`config.json` of the exported model, readable by transformers 4 and 5."""
    scaling = args.rope_scaling and {
        "rope_type": "llama3",
        "factor": args.rope_scaling.factor,
        "low_freq_factor": args.rope_scaling.low_freq_factor,
        "high_freq_factor": args.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "max_position_embeddings": args.max_seq_len,
        "mlp_bias": False,
        "num_attention_heads": args.n_heads,
        "num_hidden_layers": args.n_layers,
        "num_key_value_heads": args.n_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_scaling": scaling,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.tie_embeddings,
        "torch_dtype": dtype,
        "vocab_size": args.vocab_size,
    }


class _Rope(BaseModel):
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


class _Config(BaseModel):
    """The keys of a `config.json` that matter to this model. A literal is the only value that it can represent."""

    model_config = {"strict": True}

    model_type: Literal["llama"]
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
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
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False


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


def args(config: dict[str, Any]) -> LlamaArgs:
    """The hyper-parameters in a `config.json` of transformers 4 or 5.

    Raises:
        ConfigError: every reason why `LlamaArgs` can't represent the model.
    """
    try:
        found = _Config.model_validate(config)
        rope = found.rope_parameters or found.rope_scaling or _Rope()
        values = {ours: getattr(found, theirs) for ours, theirs in _KEYS.items()}
        values["n_kv_heads"] = found.num_key_value_heads or found.num_attention_heads
        values["rope_theta"] = rope.rope_theta or found.rope_theta or 10_000.0
        made = LlamaArgs(**values, rope_scaling=rope.scaling())
    except ValidationError as error:
        raise ConfigError([f"config.json: {_explain(item)}" for item in error.errors()]) from None
    except ValueError as error:
        raise ConfigError([f"config.json: {error}"]) from None
    if found.head_dim not in (None, made.head_dim):
        required = f"hidden_size / num_attention_heads, {made.head_dim}"
        raise ConfigError([f"config.json: head_dim is {found.head_dim}, must be {required}"])
    return made


def _explain(item: Any) -> str:
    key = ".".join(_KEYS.get(part, str(part)) for part in item["loc"])
    if item["type"] == "missing":
        return f"{key} is missing"
    return ": ".join(filter(None, (key, explain_value(item))))
