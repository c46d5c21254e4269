"""Llama 3 with QK-norm: RMSNorm on each head's queries and keys, as in Qwen3, whose Hugging Face format it exports.

torchtitan train CONFIG.toml --experimental.custom_import qk_norm --model.name llama3_qk_norm
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torchtitan.models import HFMap, llama3, register
from torchtitan.models.decoder import Attention, Block, Decoder
from torchtitan.models.decoder_args import DecoderArgs
from torchtitan.models.layers import Attend


class QKNormAttention(Attention):
    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__(args, attend)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class QKNormBlock(Block):
    attention_class = QKNormAttention


class QKNormLlama(Decoder):
    block_class = QKNormBlock


def hf_names(args: DecoderArgs) -> dict[str, str]:
    norms = {
        f"layers.{i}.attention.{norm}.weight": f"model.layers.{i}.self_attn.{norm}.weight"
        for i in range(args.n_layers)
        for norm in ("q_norm", "k_norm")
    }
    return llama3.spec.hf.names(args) | norms


def hf_config(args: DecoderArgs, dtype: str) -> dict[str, Any]:
    return llama3.spec.hf.config(args, dtype) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


styles = {"layers.*.attention.q_norm": "head_norm", "layers.*.attention.k_norm": "head_norm"}
register(
    replace(
        llama3.spec,
        name="llama3_qk_norm",
        build=QKNormLlama,
        tensor_parallel_styles={**llama3.spec.tensor_parallel_styles, **styles},
        hf=HFMap(hf_names, hf_config, args=lambda config: llama3.spec.hf.args(config | {"model_type": "llama"})),
    )
)
