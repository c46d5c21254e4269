"""Names of a decoder's weights in Hugging Face's files. Imports no torch.

Our RoPE layout is theirs, so no weight is permuted. Where a class of transformers has other
names, its family replaces them in `HFConfig.block_names`.
"""

from collections.abc import Callable
from dataclasses import replace

from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf_names import HFNames, HFSlice, Theirs

_ATTENTION = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
}
_BIASES = {f"attention.w{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_NORMS = {
    "before": {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    },
    "after": {
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
    },
    "both": {
        "attention_norm.weight": "input_layernorm.weight",
        "attention_post_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
    },
}
"""Names of the norms, by `norm_placement`. Llama names the norm before the feed-forward network
after what it follows, `post_attention_layernorm`; a norm after attention takes over this name.
"""
_MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "output_norm.weight": "shared_head.norm.weight",
}
"""Names in modules that predict further tokens, as in DeepSeek-V3's files."""
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def decoder_names(args: DecoderArgs, block: Callable[[int], HFNames]) -> HFNames:
    """Our parameter names to Hugging Face's. A tied model has neither `output.weight` nor
    `lm_head.weight`.

    Args:
        block: names of a layer's weights, relative to the layer. The layers behind the last one are
            the modules that predict further tokens.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    embeddings = [f"model.layers.{i}.embed_tokens.weight" for i in args.mtp_layers]
    heads = [f"model.layers.{i}.shared_head.head.weight" for i in args.mtp_layers]
    if args.tie_embeddings:
        embeddings += heads
    names: HFNames = {
        "tok_embeddings.weight": _with_copies(embedding, embeddings),
        "norm.weight": "model.norm.weight",
    }
    for i in range(args.n_layers + args.n_mtp):
        prefix = f"model.layers.{i}."
        names |= {f"layers.{i}.{ours}": _within(prefix, their) for ours, their in block(i).items()}
    if not args.tie_embeddings:
        names["output.weight"] = _with_copies(head, heads)
    return names


def _with_copies(name: str, copies: list[str]) -> str | HFSlice:
    return HFSlice(name, copies=tuple(copies)) if copies else name


def _within(prefix: str, theirs: Theirs) -> Theirs:
    if isinstance(theirs, list):
        return [_within(prefix, name) for name in theirs]  # type: ignore[return-value]
    if isinstance(theirs, HFSlice):
        copies = tuple(prefix + name for name in theirs.copies)
        return replace(theirs, name=prefix + theirs.name, copies=copies)
    return prefix + theirs


def block_names(args: DecoderArgs, layer: int) -> HFNames:
    """Names of the weights of one layer, relative to it, as in most classes."""
    names: HFNames = dict(_NORMS[args.norm_placement])
    names |= _attention_names(args)
    if layer in args.mtp_layers:
        names |= _MTP
    if not args.has_experts(layer):
        return names | feed_forward_names(args, "feed_forward", "mlp")
    names["moe.router.gate.weight"] = "mlp.gate.weight"
    for ours, theirs in _MATRICES.items():
        experts = [f"mlp.experts.{e}.{theirs}.weight" for e in range(args.n_experts)]
        names[f"moe.experts.{ours}"] = experts
    return names


def feed_forward_names(args: DecoderArgs, ours: str, theirs: str) -> HFNames:
    """Names of the weights of the feed-forward network that we call `ours`, and they `theirs`."""
    ends = ("weight", "bias") if args.ffn_bias else ("weight",)
    return {
        f"{ours}.{our}.{end}": f"{theirs}.{their}.{end}"
        for end in ends
        for our, their in _MATRICES.items()
    }


def _attention_names(args: DecoderArgs) -> HFNames:
    names: HFNames = dict(_ATTENTION)
    if args.qkv_bias:
        names |= _BIASES
    if args.wo_bias:
        names["attention.wo.bias"] = "self_attn.o_proj.bias"
    if args.qk_norm:
        infix = "w" if args.qk_norm_whole else ""
        for x in "qk":
            names[f"attention.{infix}{x}_norm.weight"] = f"self_attn.{x}_norm.weight"
    if args.sinks:
        names["attention.sinks.weight"] = "self_attn.sinks"
    return names
