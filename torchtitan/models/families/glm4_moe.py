"""GLM-4.5's mixtures of experts (GLM-4.5 Team, arXiv:2508.06471)."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from torchtitan.models.args import DEBUG_EXPERTS, DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.deepseek import SharedExpertsConfig


class _Config(SharedExpertsConfig):
    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {
        **SharedExpertsConfig.keys,
        "qkv_bias": "attention_bias",
        "qk_norm": "use_qk_norm",
    }
    router_scores: ClassVar[str] = "sigmoid"
    partial_rope = True
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_routed_experts: int | None = 128
    moe_intermediate_size: int = 1408
    first_k_dense_replace: int | None = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"


_glm = partial(
    DecoderArgs,
    vocab_size=151552,
    n_heads=96,
    n_kv_heads=8,
    head_size=128,
    rope_theta=1e6,
    rope_fraction=0.5,
    qkv_bias=True,
    experts_per_token=8,
    router_scores="sigmoid",
)

FLAVORS = {
    "debugmodel": _glm(
        **DEBUG_SIZES,
        **DEBUG_EXPERTS,
        n_heads=8,
        n_kv_heads=4,
        head_size=64,
        qk_norm=True,
        n_dense_layers=1,
        route_scale=2.5,
        shared_expert_dim=128,
    ),
    "106B-A12B": _glm(
        dim=4096,
        n_layers=46,
        ffn_dim=10944,
        n_experts=128,
        expert_dim=1408,
        n_dense_layers=1,
        shared_expert_dim=1408,
    ),
    "355B-A32B": _glm(
        dim=5120,
        n_layers=92,
        qk_norm=True,
        ffn_dim=12288,
        n_experts=160,
        expert_dim=1536,
        n_dense_layers=3,
        route_scale=2.5,
        shared_expert_dim=1536,
    ),
}

spec = register_decoder("glm4_moe", FLAVORS, _Config)
