"""Llama 3 with capped logits (Gemma 2, arXiv:2408.00118): they stay between -cap and cap.

torchtitan train CONFIG.toml --experimental.custom_import soft_cap --model.name llama3_capped
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from torchtitan.models import register
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder.model import Decoder
from torchtitan.models.families import llama3


class CappedArgs(DecoderArgs):
    cap: Annotated[float, Field(gt=0)] = 30.0
    """Largest absolute logit."""


class CappedLlama(Decoder):
    args: CappedArgs

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.args.cap * torch.tanh(super().project(x, weight) / self.args.cap)


flavors = {name: CappedArgs(**args.model_dump()) for name, args in llama3.FLAVORS.items()}
register(llama3.spec.variant("llama3_capped", flavors=flavors, build=CappedLlama))
