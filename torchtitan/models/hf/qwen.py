"""`config.json` of Qwen's mixtures of experts. Imports no torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf.blocks import feed_forward_names
from torchtitan.models.hf.config import FirstLayers, HFConfig
from torchtitan.models.hf_names import HFNames


class ExpertsConfig(HFConfig):
    """Keys of mixtures of experts whose first layers may be dense."""

    decoder_sparse_step: Literal[1] = 1
    mlp_only_layers: FirstLayers = 0
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False


class SharedExpertConfig(ExpertsConfig):
    """Keys of mixtures with a gated expert that all tokens share."""

    keys: ClassVar[Mapping[str, str]] = {"shared_expert_dim": "shared_expert_intermediate_size"}
    shared_expert_gate: ClassVar[bool] = True
    shared_expert_intermediate_size: int

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        names = super().block_names(args, layer)
        if args.has_experts(layer):
            names |= feed_forward_names(args, "moe.shared", "mlp.shared_expert")
            names["moe.shared_gate.weight"] = "mlp.shared_expert_gate.weight"
        return names

    @classmethod
    def write(cls, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        # These classes always have a shared expert; they can't express a model without one.
        shared = args.shared_expert_dim or args.expert_dim
        return super().write(args, dtype) | {"shared_expert_intermediate_size": shared}
