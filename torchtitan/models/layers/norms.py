"""RMSNorm (Zhang & Sennrich, arXiv:1910.07467), in the forms that decoders use."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.args import DecoderArgs
from torchtitan.models.layers.eager import runs_eagerly
from torchtitan.utils.torch_compat import torch_is_before_2_13


def build_norm(width: int, args: DecoderArgs, eps: float | None = None) -> "RMSNorm":
    """The norm of a decoder, over the last dimension of this width.

    Args:
        eps: default: `args.norm_eps`.
    """
    kind = OffsetRMSNorm if args.norm_plus_one else RMSNorm
    return kind(width, eps=eps or args.norm_eps, elementwise_affine=args.norm_weights)


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang & Sennrich, arXiv:1910.07467) over the last dimension, with a weight.

    torch has a fused kernel on CUDA. On the CPU it runs several operations, each of which keeps its
    input for the backward, in fp32. This class, in eager mode, keeps only the norm's input and one
    number per row, and makes fewer passes.
    """

    def forward(self, x: Tensor) -> Tensor:
        on_cpu = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
        fused = (
            on_cpu and runs_eagerly(x) and self.weight is not None and not torch_is_before_2_13()
        )
        if fused:
            return _RMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    """Computes in fp32, whatever the type of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        gradient, factor = gradient.float(), weight.float()
        # LayerNorm's kernel, for a mean of 0. It also removes the gradient's mean: add that again.
        arguments = (
            weight.shape,
            torch.zeros_like(scale),
            scale,
            factor,
            None,
            (True, True, False),
        )
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x.float(), *arguments
        )
        grad_x.add_((gradient @ factor).unsqueeze(-1).mul_(scale).div_(x.shape[-1]))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class OffsetRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32: in bf16, small weights would be lost."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return super().forward(x)
        weight = self.weight.float() + 1
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)
