"""gpt-oss (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925)."""

from functools import partial
from typing import ClassVar, Literal

from torchtitan.config.types import Layers
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.config import HFConfig, LayerTypes
from torchtitan.models.hf.rope import Rope
from torchtitan.models.hf_names import HFNames, HFSlice
from torchtitan.models.rope_scaling import YarnScaling


class _Config(HFConfig):
    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    keys: ClassVar = {
        "n_experts": "num_local_experts",
        "expert_dim": "intermediate_size",
        "qkv_bias": "attention_bias",
        "wo_bias": "attention_bias",
    }
    explicit_head_size = True
    default_theta = 150_000.0
    default_rope = Rope(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    )
    full_every = 2
    sinks: ClassVar = True
    activation: ClassVar = "clamped_swiglu"
    ffn_bias: ClassVar = True
    router_bias: ClassVar = True
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: Layers = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: LayerTypes = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: Literal[1.702] = 1.702  # type: ignore[valid-type]
    swiglu_limit: Literal[7.0] = 7.0  # type: ignore[valid-type]

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        names = super().block_names(args, layer)
        for end in ("weight", "bias"):
            names[f"moe.router.gate.{end}"] = f"mlp.router.{end}"
        stacks = "mlp.experts"
        for column, number in enumerate((1, 3)):  # gate and up alternate
            take = (column, column + 1)
            names[f"moe.experts.w{number}"] = HFSlice(
                f"{stacks}.gate_up_proj", take=take, of=2, dim=2, transposed=True
            )
            names[f"moe.experts.b{number}"] = HFSlice(
                f"{stacks}.gate_up_proj_bias", take=take, of=2, dim=1
            )
        names["moe.experts.w2"] = HFSlice(f"{stacks}.down_proj", transposed=True)
        names["moe.experts.b2"] = f"{stacks}.down_proj_bias"
        return names


_gpt_oss = partial(
    DecoderArgs,
    vocab_size=201088,
    dim=2880,
    n_heads=64,
    n_kv_heads=8,
    head_size=64,
    layer_pattern=("window", "full"),
    window=128,
    sinks=True,
    qkv_bias=True,
    wo_bias=True,
    rope_theta=150_000.0,
    rope_scaling=YarnScaling(factor=32.0, original_max_seq_len=4096, truncate=False),
    ffn_dim=2880,
    activation="clamped_swiglu",
    ffn_bias=True,
    experts_per_token=4,
    expert_dim=2880,
    router_bias=True,
)

FLAVORS = {
    "debugmodel": _gpt_oss(
        vocab_size=2048,
        dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        window=64,
        ffn_dim=192,
        n_experts=16,
        expert_dim=192,
    ),
    "20b": _gpt_oss(n_layers=24, n_experts=32),
    "120b": _gpt_oss(n_layers=36, n_experts=128),
}

spec = register_decoder("gpt_oss", FLAVORS, _Config)
