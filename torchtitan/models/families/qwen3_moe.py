"""Qwen3's mixtures of experts (Qwen Team, "Qwen3 Technical Report", arXiv:2505.09388)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs, LayerKind
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.qwen import ExpertsConfig


class _Config(ExpertsConfig):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    qk_norm = True
    explicit_head_size = True
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    attention_bias: Literal[False] = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768

    def layer_kinds(self) -> Sequence[LayerKind]:
        windows = self.use_sliding_window and self.sliding_window is not None
        return ["window" if windows else "full"] * self.num_hidden_layers

    @classmethod
    def write_layers(cls, args: DecoderArgs) -> dict[str, Any]:
        if "window" not in args.kinds:
            return {"use_sliding_window": False}
        return super().write_layers(args) | {"use_sliding_window": True}


_qwen3 = partial(
    DecoderArgs,
    vocab_size=151936,
    n_kv_heads=4,
    head_size=128,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
    n_experts=128,
    experts_per_token=8,
)

FLAVORS = {
    "debugmodel": _qwen3(
        **DEBUG_SIZES,
        n_layers=4,
        n_heads=8,
        head_size=64,
        n_experts=16,
        experts_per_token=4,
        expert_dim=192,
    ),
    "30B-A3B": _qwen3(dim=2048, n_layers=48, n_heads=32, ffn_dim=6144, expert_dim=768),
    "235B-A22B": _qwen3(dim=4096, n_layers=94, n_heads=64, ffn_dim=12288, expert_dim=1536),
}

spec = register_decoder("qwen3_moe", FLAVORS, _Config)
