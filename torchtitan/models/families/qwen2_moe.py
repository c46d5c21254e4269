"""Qwen2's mixtures of experts (Qwen Team, "Qwen2 Technical Report", arXiv:2407.10671), with a gated
expert that all tokens share. The smaller was published as Qwen1.5.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from torchtitan.models.args import DEBUG_EXPERTS, DEBUG_SIZES, DecoderArgs, LayerKind
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.qwen import SharedExpertConfig
from torchtitan.models.hf.windows import LaterWindows


class _Config(SharedExpertConfig, LaterWindows):
    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {**SharedExpertConfig.keys, "qkv_bias": "qkv_bias"}
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 32768
    qkv_bias: bool = True
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632

    def layer_kinds(self) -> Sequence[LayerKind]:
        if self.layer_types is not None or not self.use_sliding_window:
            return super().layer_kinds()
        layers = range(self.num_hidden_layers)  # every other of the first `max_window_layers`
        return ["full" if i % 2 or i >= self.max_window_layers else "window" for i in layers]


_qwen2_moe = partial(
    DecoderArgs,
    vocab_size=151936,
    norm_eps=1e-6,
    rope_theta=1e6,
    qkv_bias=True,
    normalize_expert_weights=False,
    shared_expert_gate=True,
)

FLAVORS = {
    "debugmodel": _qwen2_moe(
        **DEBUG_SIZES, **DEBUG_EXPERTS, n_heads=8, n_kv_heads=4, shared_expert_dim=256
    ),
    "A2.7B": _qwen2_moe(
        dim=2048,
        n_layers=24,
        n_heads=16,
        n_kv_heads=16,
        ffn_dim=5632,
        n_experts=60,
        experts_per_token=4,
        expert_dim=1408,
        shared_expert_dim=5632,
    ),
    "57B-A14B": _qwen2_moe(
        dim=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        ffn_dim=18944,
        n_experts=64,
        experts_per_token=8,
        expert_dim=2560,
        shared_expert_dim=20480,
    ),
}

spec = register_decoder("qwen2_moe", FLAVORS, _Config)
