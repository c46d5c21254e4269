"""Qwen3-Next (Qwen Team, "Qwen3-Next: Towards Ultimate Training & Inference Efficiency", 2025):
three layers of Gated DeltaNet to one of gated attention, and a mixture of experts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

from pydantic import Field

from torchtitan.models.args import DEBUG_EXPERTS, DEBUG_SIZES, DecoderArgs, LayerKind
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.config import LayerTypes
from torchtitan.models.hf.qwen import SharedExpertConfig
from torchtitan.models.hf_names import HFNames, HFSlice


class _Config(SharedExpertConfig):
    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    keys: ClassVar[Mapping[str, str]] = {
        **SharedExpertConfig.keys,
        "delta_key_heads": "linear_num_key_heads",
        "delta_value_heads": "linear_num_value_heads",
        "delta_key_size": "linear_key_head_dim",
        "delta_value_size": "linear_value_head_dim",
        "delta_conv_size": "linear_conv_kernel_dim",
    }
    ignored = ("mtp.*",)
    kinds = ("full", "delta")
    explicit_head_size = True
    partial_rope = True
    qk_norm = True
    gated_attention: ClassVar[bool] = True
    norm_plus_one: ClassVar[bool] = True
    intermediate_size: int = 5632
    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    partial_rotary_factor: float | None = 0.25
    max_position_embeddings: int = 32768
    attention_bias: Literal[False] = False
    layer_types: LayerTypes = None
    full_attention_interval: int = Field(4, gt=0)
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True

    def periodic_kinds(self) -> Sequence[LayerKind]:
        layers = range(1, self.num_hidden_layers + 1)
        return ["delta" if i % self.full_attention_interval else "full" for i in layers]

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        names = super().block_names(args, layer)
        if args.kind(layer) == "delta":
            names = {
                name: their for name, their in names.items() if not name.startswith("attention.")
            }
            names |= _delta_names(args)
        else:
            size = args.head_dim
            joint = "self_attn.q_proj.weight"
            names["attention.wq.weight"] = HFSlice(joint, take=(0, size), of=2 * size)
            names["attention.wg.weight"] = HFSlice(joint, take=(size, 2 * size), of=2 * size)
        return names


def _delta_names(args: DecoderArgs) -> HFNames:
    """Names of a layer of Gated DeltaNet, whose three convolutions are one there."""
    keys = args.delta_key_heads * args.delta_key_size
    values = args.delta_value_heads * args.delta_value_size
    rows = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, 2 * keys + values)}
    names: HFNames = {
        f"delta.{name}.weight": f"linear_attn.{name}.weight"
        for name in ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj")
    }
    names |= {f"delta.{name}.weight": f"linear_attn.{name}" for name in ("A_log", "dt_bias")}
    for name, channels in rows.items():
        names[f"delta.{name}_conv.weight"] = HFSlice(
            "linear_attn.conv1d.weight", take=channels, of=2 * keys + values, dropped=1
        )
    return names


_qwen3_next = partial(
    DecoderArgs,
    vocab_size=151936,
    layer_pattern=("delta", "delta", "delta", "full"),
    n_kv_heads=2,
    head_size=256,
    gated_attention=True,
    qk_norm=True,
    rope_theta=1e7,
    rope_fraction=0.25,
    norm_eps=1e-6,
    norm_plus_one=True,
    shared_expert_gate=True,
)

FLAVORS = {
    "debugmodel": _qwen3_next(
        **DEBUG_SIZES,
        **DEBUG_EXPERTS,
        n_heads=4,
        head_size=64,
        delta_key_heads=4,
        delta_value_heads=8,
        delta_key_size=32,
        delta_value_size=32,
        shared_expert_dim=128,
    ),
    "80B-A3B": _qwen3_next(
        dim=2048,
        n_layers=48,
        n_heads=16,
        delta_key_heads=16,
        delta_value_heads=32,
        delta_key_size=128,
        delta_value_size=128,
        ffn_dim=5120,
        n_experts=512,
        experts_per_token=10,
        expert_dim=512,
        shared_expert_dim=512,
    ),
}

spec = register_decoder("qwen3_next", FLAVORS, _Config)
