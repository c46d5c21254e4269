"""`config.json` and weights that DeepSeek's classes in Hugging Face's transformers, and classes
built like them, have in common. Imports no torch.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf.blocks import feed_forward_names
from torchtitan.models.hf.config import HFConfig
from torchtitan.models.hf_names import HFNames, HFSlice

_LATENT = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
_ABSENT = {True: ("wq",), False: ("wq_a", "q_norm", "wq_b")}
"""Weights that latent attention lacks, by whether queries are compressed."""

_HEAD_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class SharedExpertsConfig(HFConfig):
    """Keys of mixtures of experts whose first layers are dense, with experts that all tokens share.
    Modules that predict further tokens may follow the last layer.
    """

    keys: ClassVar[Mapping[str, str]] = {
        "n_experts": "n_routed_experts",
        "n_expert_groups": "n_group",
        "expert_groups_per_token": "topk_group",
        "route_scale": "routed_scaling_factor",
        "n_dense_layers": "first_k_dense_replace",
        "n_mtp": "num_nextn_predict_layers",
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "model.layers.{n_layers}.*",
    )  # the module that predicts further tokens, unless it is trained
    has_router_bias: ClassVar[bool] = True
    """Whether the folders have the biases that balance the experts."""

    n_routed_experts: int | None
    n_shared_experts: int | None = 1
    num_experts_per_tok: int | None = 8
    moe_intermediate_size: int
    n_group: int | None = 1
    topk_group: int | None = 1
    first_k_dense_replace: int | None = 0
    norm_topk_prob: bool | None = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int | None = 0

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        names = super().block_names(args, layer)
        if not args.has_experts(layer):
            return names
        if cls.has_router_bias:
            bias = "mlp.gate.e_score_correction_bias"
            names["moe.router.expert_bias"] = HFSlice(bias, buffer=True)
        if args.shared_expert_dim:
            names |= feed_forward_names(args, "moe.shared", "mlp.shared_experts")
        return names

    @classmethod
    def write(cls, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        config = super().write(args, dtype)
        config["n_shared_experts"] = args.shared_expert_dim // args.expert_dim
        if not args.n_experts:
            config["first_k_dense_replace"] = args.n_layers
        return config

    def hyper_parameters(self) -> dict[str, Any]:
        values = super().hyper_parameters()
        for name in ("n_experts", "experts_per_token", "n_dense_layers", "n_mtp"):
            values[name] = values.get(name) or 0
        for name in ("n_expert_groups", "expert_groups_per_token"):
            values[name] = values[name] or 1
        shared = (self.n_shared_experts or 0) * self.moe_intermediate_size
        return values | {
            "normalize_expert_weights": bool(self.norm_topk_prob),
            "shared_expert_dim": shared if values["n_experts"] else 0,
        }


class LatentConfig(SharedExpertsConfig):
    """Keys of latent attention, besides the experts' keys."""

    keys: ClassVar[Mapping[str, str]] = {
        **SharedExpertsConfig.keys,
        "kv_lora_rank": "kv_lora_rank",
        "rope_head_size": "qk_rope_head_dim",
        "value_head_size": "v_head_dim",
    }
    rope_interleaved: ClassVar[bool] = True

    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        usual = super().block_names(args, layer)
        names = {name: their for name, their in usual.items() if not name.startswith("attention.")}
        absent = _ABSENT[args.q_lora_rank > 0]
        for ours, theirs in _LATENT.items():
            if ours not in absent:
                names[f"latent_attention.{ours}.weight"] = f"self_attn.{theirs}.weight"
        return names

    @classmethod
    def write(cls, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        config = super().write(args, dtype)
        del config["head_dim"]  # transformers derives it: the features with positions
        if not args.kv_lora_rank:  # these classes have no other attention: write the defaults
            defaults = {key: cls.model_fields[key].default for key in _HEAD_KEYS}
            return config | defaults | {"num_key_value_heads": args.n_heads}
        return config | {
            "q_lora_rank": args.q_lora_rank or None,
            "qk_nope_head_dim": args.head_dim - args.rope_head_size,
            "v_head_dim": args.value_dim,
        }

    def ropes(self) -> dict[str, Any]:
        rope = self.rope()
        if rope.mscale_all_dim and rope.kind not in ("default", "yarn"):
            raise ValueError(
                f"mscale_all_dim of RoPE scaling of type {rope.kind!r}: transformers scales "
                "attention's scores by it, here it belongs to 'yarn'; remove it"
            )
        return super().ropes()

    def hyper_parameters(self) -> dict[str, Any]:
        return super().hyper_parameters() | {
            "head_size": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "q_lora_rank": self.q_lora_rank or 0,
        }
