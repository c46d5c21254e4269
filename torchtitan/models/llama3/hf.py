"""Conversion to and from Hugging Face's Llama. Its RoPE layout is ours, so no weight is permuted."""

from typing import Any

from pydantic import ValidationError

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


_REQUIRED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
"""Required values of keys that `config.json` may leave out: this model has no alternative."""


def args(config: dict[str, Any]) -> LlamaArgs:
    """The hyper-parameters in a `config.json` of transformers 4 or 5.

    Raises:
        ConfigError: every reason why `LlamaArgs` can't represent the model.
    """
    problems = [
        f"config.json: {key} is {config[key]!r}, must be {value!r}"
        for key, value in _REQUIRED.items()
        if config.get(key, value) != value
    ]
    if "model_type" not in config:
        problems.append("config.json: has no model_type")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("llama3", "default"):
        problems.append(f"config.json: RoPE scaling of type {kind!r}, must be 'llama3' or none")
    try:
        scaling = {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_seq_len": rope["original_max_position_embeddings"],
        }
    except KeyError:
        scaling = {}
    if kind == "llama3" and not scaling:
        problems.append("config.json: RoPE scaling of type 'llama3' lacks some of its factors")
    try:
        found = LlamaArgs(
            vocab_size=config["vocab_size"],
            max_seq_len=config.get("max_position_embeddings", 2048),
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            ffn_dim=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
            rope_scaling=RopeScaling(**scaling) if kind == "llama3" and scaling else None,
            tie_embeddings=config.get("tie_word_embeddings", False),
        )
        if config.get("head_dim") not in (None, found.head_dim):
            problems.append(
                f"config.json: head_dim is {config['head_dim']}, must be hidden_size / num_attention_heads, "
                f"{found.head_dim}"
            )
    except KeyError as error:
        problems.append(f"config.json: {error.args[0]} is missing")
    except ValidationError as error:
        problems += [f"config.json: {item['msg']}" for item in error.errors()]
    if problems:
        raise ConfigError(problems)
    return found
