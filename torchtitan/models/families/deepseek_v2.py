"""DeepSeek-V2 (DeepSeek-AI, arXiv:2405.04434)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from torchtitan.models.args import DEBUG_EXPERTS, DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.deepseek import LatentConfig
from torchtitan.models.rope_scaling import YarnScaling


class _Config(LatentConfig):
    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {
        **LatentConfig.keys,
        "n_mtp": "",
    }  # it predicts no further tokens
    ignored: ClassVar[tuple[str, ...]] = ()
    has_router_bias = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    n_routed_experts: int | None = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int = 1407
    moe_layer_freq: Literal[1] = 1
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: Literal[False] | None = False
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] | None = "greedy"

    @classmethod
    def write(cls, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        method = "greedy" if args.n_expert_groups == 1 else "group_limited_greedy"
        never = {"norm_topk_prob": False}
        return super().write(args, dtype) | {"topk_method": method} | never

    def hyper_parameters(self) -> dict[str, Any]:
        values = super().hyper_parameters()
        if self.topk_method != "group_limited_greedy":
            values |= {"n_expert_groups": 1, "expert_groups_per_token": 1}
        return values


_deepseek = partial(
    DecoderArgs,
    n_heads=16,
    n_kv_heads=16,
    head_size=192,
    kv_lora_rank=512,
    rope_head_size=64,
    value_head_size=128,
    rope_interleaved=True,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    normalize_expert_weights=False,
)

FLAVORS = {
    "debugmodel": _deepseek(
        **DEBUG_SIZES,
        **DEBUG_EXPERTS,
        n_heads=4,
        n_kv_heads=4,
        head_size=96,
        kv_lora_rank=64,
        rope_head_size=32,
        value_head_size=64,
        rope_scaling=YarnScaling(
            factor=4.0, original_max_seq_len=4096, mscale=0.707, mscale_all_dim=0.707
        ),
        n_dense_layers=1,
        shared_expert_dim=256,
    ),
    "Lite": _deepseek(
        vocab_size=102400,
        dim=2048,
        n_layers=27,
        rope_scaling=YarnScaling(
            factor=40.0, original_max_seq_len=4096, mscale=0.707, mscale_all_dim=0.707
        ),
        ffn_dim=10944,
        n_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        n_dense_layers=1,
        shared_expert_dim=2816,
    ),
}

spec = register_decoder("deepseek_v2", FLAVORS, _Config)
