"""Llama 3 in Hugging Face's names. RoPE pairs the halves of a head as theirs does, so no weight is rearranged."""

from typing import Any

from torchtitan.models.llama3.args import LlamaArgs

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
    """Our parameter names to Hugging Face's. A tied model has no `lm_head.weight` there, nor `output.weight` here."""
    output = {} if args.tie_embeddings else {"output.weight": "lm_head.weight"}
    blocks = {
        f"layers.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
        for i in range(args.n_layers)
        for ours, theirs in _BLOCK.items()
    }
    return _TOP | blocks | output


def config(args: LlamaArgs, dtype: str) -> dict[str, Any]:
    """`config.json` of the exported model, in the spelling that transformers 4 and 5 both read."""
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
