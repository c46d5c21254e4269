"""Qwen3-MoE with other blocks: attention without positions (Kazemnejad et al., arXiv:2305.19466),
and experts with squared ReLUs (So et al., arXiv:2109.08668), whose networks have two matrices
instead of three.

torchtitan train CONFIG.toml --experimental.custom_import relu_squared --model.name qwen3_moe_relu2
"""

import torch
from torch import Tensor

from torchtitan.models import register
from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention.interface import Mask
from torchtitan.models.decoder.model import Attention, Decoder, MoEBlock
from torchtitan.models.decoder.traits import module_flops
from torchtitan.models.families import qwen3_moe
from torchtitan.models.moe.moe import Experts, MoE


class NoPositions(Attention):
    cost = Attention.cost

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        return super().forward(x, torch.ones_like(cos), torch.zeros_like(sin), mask)


class ReluSquared(Experts):
    def __init__(self, n_experts: int, dim: int, hidden_dim: int):
        super().__init__(n_experts, dim, hidden_dim)
        del self.w3

    def compute(self, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        w1, w2 = weights
        return self.product(self.product(rows, w1, ends).relu().square(), w2, ends)


class ReluMoE(MoE):
    experts_class = ReluSquared


class ReluBlock(MoEBlock):
    attention_class = NoPositions
    moe_class = ReluMoE


class ReluDecoder(Decoder):
    moe_block_class = ReluBlock


def flops(args: DecoderArgs, seq_len: int) -> dict[str, float]:
    found = module_flops(args, seq_len)
    for layer in range(args.n_layers):
        if args.has_experts(layer):
            found[f"layers.{layer}"] -= 6 * args.dim * args.experts_per_token * args.expert_dim
    return found


register(qwen3_moe.spec.variant("qwen3_moe_relu2", build=ReluDecoder, module_flops=flops))
