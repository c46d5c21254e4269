"""Mixtral (Jiang et al., "Mixtral of Experts", arXiv:2401.04088)."""

from typing import ClassVar

from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.windows import OneWindow
from torchtitan.models.hf_names import HFNames


class _Config(OneWindow):
    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    keys: ClassVar = {"n_experts": "num_local_experts", "expert_dim": "intermediate_size"}
    default_theta = 1e6
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    @classmethod
    def block_names(cls, args: DecoderArgs, layer: int) -> HFNames:
        names = super().block_names(args, layer)
        names["moe.router.gate.weight"] = "block_sparse_moe.gate.weight"
        for matrix in ("w1", "w2", "w3"):
            experts = [f"block_sparse_moe.experts.{e}.{matrix}" for e in range(args.n_experts)]
            names[f"moe.experts.{matrix}"] = [f"{expert}.weight" for expert in experts]
        return names


def _mixtral(dim: int, ffn_dim: int, **sizes: int) -> DecoderArgs:
    values = {"vocab_size": 32000, "n_kv_heads": 8, "n_experts": 8, "experts_per_token": 2}
    experts = {"ffn_dim": ffn_dim, "expert_dim": ffn_dim}
    return DecoderArgs(dim=dim, rope_theta=1e6, **values | experts | sizes)


FLAVORS = {
    "debugmodel": _mixtral(256, 256, vocab_size=2048, n_layers=4, n_heads=8, n_kv_heads=4),
    "8x7B": _mixtral(4096, 14336, n_layers=32, n_heads=32),
    "8x22B": _mixtral(6144, 16384, n_layers=56, n_heads=48),
}

spec = register_decoder("mixtral", FLAVORS, _Config)
