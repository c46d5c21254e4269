"""Llama 3 with gated attention (Qiu et al., arXiv:2505.06708): each head's output is scaled by a
gate between 0 and 1, which is computed from the block's input.

torchtitan train CONFIG.toml --experimental.custom_import gated_attention --model.name llama3_gated
"""

from torch import Tensor, nn

from torchtitan.models import register
from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention.interface import Attend, Mask
from torchtitan.models.costs import Cost, products_of
from torchtitan.models.decoder.model import Attention, Block, Decoder
from torchtitan.models.families import llama3
from torchtitan.models.layers.rope import apply_rope
from torchtitan.models.spec import ShardingStyle


class GatedAttention(Attention):
    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__(args, attend)
        self.gate = nn.Linear(args.dim, args.n_heads, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        q, k, v = self.project(x)
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = self.attend(q, k, v, self.scores.masked(mask))
        gated = out.transpose(1, 2) * self.gate(x).sigmoid().unsqueeze(-1)
        return self.wo(gated.flatten(2))

    def cost(self, seq_len: int) -> Cost:
        width = self.wo.in_features
        gating = Cost(products_of(self, ("gate",)), moved=2 * width, saved=width)
        return super().cost(seq_len) + gating


class GatedBlock(Block):
    attention_class = GatedAttention


class GatedLlama(Decoder):
    block_class = GatedBlock


styles = {**llama3.spec.tensor_parallel_styles, "layers.*.attention.gate": ShardingStyle.COLUMNS}
register(llama3.spec.variant("llama3_gated", build=GatedLlama, tensor_parallel_styles=styles))
