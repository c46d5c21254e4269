"""DeepSeek-V3 (DeepSeek-AI, arXiv:2412.19437), and what is built like it: Moonlight (Liu et al.,
arXiv:2502.16982) and Kimi K2 (Kimi Team, arXiv:2507.20534).
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from torchtitan.models.args import DEBUG_EXPERTS, DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.deepseek import LatentConfig
from torchtitan.models.rope_scaling import YarnScaling


class _Config(LatentConfig):
    model_type = "deepseek_v3"
    also_read = ("kimi_k2",)
    architecture = "DeepseekV3ForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {**LatentConfig.keys, "rope_interleaved": "rope_interleave"}
    router_scores: ClassVar[str] = "sigmoid"
    max_position_embeddings: int = 4096
    attention_bias: Literal[False] = False
    rope_interleave: bool = True
    n_routed_experts: int | None = 256
    moe_intermediate_size: int = 2048
    moe_layer_freq: Literal[1] = 1
    first_k_dense_replace: int | None = 3
    n_group: int | None = 8
    topk_group: int | None = 4
    routed_scaling_factor: float = 2.5
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"


_deepseek = partial(
    DecoderArgs,
    n_heads=128,
    n_kv_heads=128,
    head_size=192,
    kv_lora_rank=512,
    rope_head_size=64,
    value_head_size=128,
    rope_interleaved=True,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    router_scores="sigmoid",
)

FLAVORS = {
    "debugmodel": _deepseek(
        **DEBUG_SIZES,
        **DEBUG_EXPERTS,
        n_heads=4,
        n_kv_heads=4,
        head_size=96,
        q_lora_rank=96,
        kv_lora_rank=64,
        rope_head_size=32,
        value_head_size=64,
        rope_scaling=YarnScaling(
            factor=4.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0
        ),
        n_dense_layers=1,
        n_expert_groups=4,
        expert_groups_per_token=2,
        route_scale=2.5,
        shared_expert_dim=128,
    ),
    "671B": _deepseek(
        vocab_size=129280,
        dim=7168,
        n_layers=61,
        q_lora_rank=1536,
        rope_scaling=YarnScaling(
            factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0
        ),
        ffn_dim=18432,
        n_experts=256,
        experts_per_token=8,
        expert_dim=2048,
        n_dense_layers=3,
        n_expert_groups=8,
        expert_groups_per_token=4,
        route_scale=2.5,
        shared_expert_dim=2048,
    ),
    "Moonlight-16B-A3B": _deepseek(
        vocab_size=163840,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        rope_theta=50_000.0,
        norm_eps=1e-5,
        ffn_dim=11264,
        n_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        n_dense_layers=1,
        route_scale=2.446,
        shared_expert_dim=2816,
    ),
    "Kimi-K2": _deepseek(
        vocab_size=163840,
        dim=7168,
        n_layers=61,
        n_heads=64,
        n_kv_heads=64,
        q_lora_rank=1536,
        rope_theta=50_000.0,
        rope_scaling=YarnScaling(
            factor=32.0,
            original_max_seq_len=4096,
            beta_fast=1.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        ffn_dim=18432,
        n_experts=384,
        experts_per_token=8,
        expert_dim=2048,
        n_dense_layers=1,
        route_scale=2.827,
        shared_expert_dim=2048,
    ),
}

spec = register_decoder("deepseek_v3", FLAVORS, _Config)
