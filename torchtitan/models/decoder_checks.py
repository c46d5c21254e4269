"""What is wrong with a decoder's hyper-parameters. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.models.decoder_args import DecoderArgs, LayerKind


_OF_PARTS: Mapping[str, Collection[str]] = {
    "n_experts": (
        "experts_per_token",
        "expert_dim",
        "n_dense_layers",
        "router_scores",
        "router_bias",
        "normalize_expert_weights",
        "route_scale",
        "n_expert_groups",
        "expert_groups_per_token",
        "shared_expert_dim",
        "shared_expert_gate",
    ),
    "kv_lora_rank": ("q_lora_rank", "rope_head_size", "value_head_size", "latent_norm_eps"),
    "qk_norm": ("qk_norm_whole",),
    "mup_base_dim": ("mup_base_head_size",),
}
"""Hyper-parameters that matter only where another one is set."""
_OF_KINDS: Mapping[LayerKind, Collection[str]] = {
    "window": ("window", "window_rope_theta", "scale_window_rope"),
    "delta": (
        "delta_key_heads",
        "delta_value_heads",
        "delta_key_size",
        "delta_value_size",
        "delta_conv_size",
    ),
}
"""Hyper-parameters of some kinds of layers."""


def unused(args: DecoderArgs) -> dict[str, str]:
    """The hyper-parameters that don't matter to a model, each with what it lacks for them."""
    found: dict[str, str] = {}
    for needed, names in _OF_PARTS.items():
        if not getattr(args, needed):
            found |= dict.fromkeys(names, needed)
    for kind, names in _OF_KINDS.items():
        if kind not in args.kinds:
            found |= dict.fromkeys(names, f'"{kind}" in layer_pattern')
    if args.n_experts and not args.n_dense_layers:
        found["ffn_dim"] = "n_dense_layers"
    return found


def problems(args: DecoderArgs) -> list[str]:
    """Why no decoder has these hyper-parameters; empty if one can."""
    return [*_attention_problems(args), *_expert_problems(args)]


def _attention_problems(args: DecoderArgs) -> Iterator[str]:
    if args.head_size is None and (args.dim % args.n_heads or args.head_dim % 2):
        yield f"dim {args.dim} must be n_heads {args.n_heads} times an even head size"
    if args.head_dim % 2:
        yield f"head_size {args.head_size} must be even"
    if args.n_heads % args.n_kv_heads:
        yield f"n_heads {args.n_heads} must be a multiple of n_kv_heads {args.n_kv_heads}"
    if "window" in args.layer_pattern and args.window is None:
        yield "layer_pattern has window layers, so window must be set"
    if args.rope_dim % 2:
        yield (
            f"rope_fraction {args.rope_fraction:g} of head_size {args.head_dim} must be an even "
            "number of features"
        )
    if args.qk_norm_whole and not args.qk_norm:
        yield "qk_norm_whole needs qk_norm = true"
    if args.attention_scale and args.mup_base_head_size:
        yield "attention_scale and mup_base_head_size both set the scale of scores: set one"
    if args.kv_lora_rank:
        yield from _latent_problems(args)
    elif args.q_lora_rank or args.rope_head_size or args.value_head_size:
        yield "q_lora_rank, rope_head_size and value_head_size need latent attention: kv_lora_rank"
    if "delta" in args.layer_pattern:
        sizes = (args.delta_key_heads, args.delta_value_heads)
        if not all((*sizes, args.delta_key_size, args.delta_value_size)):
            yield (
                "layer_pattern has delta layers, so delta_key_heads, delta_value_heads, "
                "delta_key_size and delta_value_size must be set"
            )
        elif sizes[1] % sizes[0]:
            yield f"delta_value_heads {sizes[1]} must be a multiple of delta_key_heads {sizes[0]}"


def _latent_problems(args: DecoderArgs) -> Iterator[str]:
    if not 0 < args.rope_head_size < args.head_dim:
        yield (
            f"rope_head_size {args.rope_head_size} must be 1 to head_size {args.head_dim} - 1 with "
            "latent attention"
        )
    if args.n_kv_heads != args.n_heads:
        yield f"n_kv_heads {args.n_kv_heads} must be n_heads {args.n_heads} with latent attention"
    if args.rope_fraction != 1:
        yield "rope_fraction is not for latent attention (kv_lora_rank), which has rope_head_size"
    ordinary = ("sinks", "gated_attention", "qk_norm", "qkv_bias", "wo_bias")
    for name in ordinary:
        if getattr(args, name):
            yield f"{name} is not for latent attention (kv_lora_rank)"


def _expert_problems(args: DecoderArgs) -> Iterator[str]:
    if not args.n_experts:
        return
    n = args.n_experts
    k = args.experts_per_token
    groups = args.n_expert_groups
    if not 1 <= k <= n:
        yield f"experts_per_token {k} must be 1 to n_experts {n}"
    if n % groups:
        yield f"n_experts {n} must be a multiple of n_expert_groups {groups}"
    elif args.expert_groups_per_token > groups:
        chosen = args.expert_groups_per_token
        yield f"expert_groups_per_token {chosen} must be at most n_expert_groups {groups}"
    elif k > args.expert_groups_per_token * (n // groups):
        yield (
            f"experts_per_token {k} must be at most the {n // groups} experts of each of the "
            f"{args.expert_groups_per_token} groups of a token"
        )
    if args.shared_expert_gate and not args.shared_expert_dim:
        yield "shared_expert_gate needs shared_expert_dim"
