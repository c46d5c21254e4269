"""Llama 3 with parallel blocks (PaLM, Chowdhery et al., arXiv:2204.02311, section 2): attention and
feed-forward read the same norm, and both are added at once.
"""

from torch import Tensor

from torchtitan.models import register
from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention.interface import Attend, Mask
from torchtitan.models.decoder.model import Block, Decoder
from torchtitan.models.families import llama3


class ParallelBlock(Block):
    def __init__(self, args: DecoderArgs, attend: Attend):
        super().__init__(args, attend)
        self.ffn_norm = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        read = self.attention_norm(x)
        return x + self.attention(read, cos, sin, mask) + self.feed_forward(read)


class ParallelLlama(Decoder):
    block_class = ParallelBlock


register(llama3.spec.variant("llama3_parallel", build=ParallelLlama))
