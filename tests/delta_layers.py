"""A small Gated DeltaNet layer with weights as after some training, and a batch for it."""

from types import SimpleNamespace

import torch

from torchtitan.models.attention.interface import DocumentMask
from torchtitan.models.delta.layer import GatedDeltaNet

ARGS = SimpleNamespace(
    dim=32,
    delta_key_heads=4,
    delta_value_heads=8,
    delta_key_size=16,
    delta_value_size=24,
    delta_conv_size=4,
    norm_eps=1e-6,
)
SEQ = 140
GRADIENT = torch.randn(2, SEQ, ARGS.dim, generator=torch.Generator().manual_seed(1))
"""Of the layer's output."""


def filled(args=ARGS):
    """The same weights on every rank."""
    generator = torch.Generator().manual_seed(2)
    layer = GatedDeltaNet(args)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name == "A_log.weight":
                parameter.uniform_(0.01, 16, generator=generator).log_()
            elif name in ("norm.weight", "dt_bias.weight"):
                parameter.normal_(1.0, 0.2, generator=generator)
            else:
                parameter.normal_(0.0, 0.3, generator=generator)
    return layer


def batch(seq):
    return torch.randn(2, SEQ, ARGS.dim, generator=torch.Generator().manual_seed(3))[:, :seq]


def mask_of(documents):
    """The mask of a layer that reads no more of it than the documents."""
    return None if documents is None else DocumentMask(None, documents)


def trained(layer, seq, dtype=torch.float32, documents=None):
    """The batch, whose gradient is then known, and the layer's output."""
    x = batch(seq).to(dtype).requires_grad_()
    out = layer(x, mask=mask_of(documents))
    out.backward(GRADIENT[:, :seq].to(dtype))
    return x, out


def relative(actual, expected):
    """Largest difference, relative to the largest element."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()
