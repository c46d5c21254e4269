"""A module with one parameter of each arrangement that Hugging Face's files have."""

import torch
from torch import nn

from torchtitan.models.hf_names import HFSlice

E, H, WIDE, Q = 4, 6, 10, 3
"""Experts, widths, and heads."""


class Packed(nn.Module):
    """One of each arrangement."""

    def __init__(self, args, attend):
        super().__init__()
        self.args = args
        for name, shape in {
            "w1": (E, WIDE, H),
            "w2": (E, H, WIDE),
            "w3": (E, WIDE, H),
            "b1": (E, WIDE),
            "b3": (E, WIDE),
            "stack": (E, WIDE, H),
            "q": (Q * 2, H),
            "k": (Q * 2, H),
            "v": (Q * 5, H),
            "q_conv": (6, 4),
            "v_conv": (15, 4),
            "embedding": (7, H),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.init_buffers()

    def init_buffers(self):
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E, dtype=torch.int64))


def names(args):
    gate_up = {"of": 2, "dim": 2, "transposed": True}
    packed = {"of": 9}
    conv = {"of": 21, "dropped": 1}
    return {
        "w1": HFSlice("gate_up_proj", take=(0, 1), **gate_up),
        "w3": HFSlice("gate_up_proj", take=(1, 2), **gate_up),
        "w2": HFSlice("down_proj", transposed=True),
        "b1": HFSlice("gate_up_proj_bias", take=(0, 1), of=2, dim=1),
        "b3": HFSlice("gate_up_proj_bias", take=(1, 2), of=2, dim=1),
        "stack": [f"experts.{e}.weight" for e in range(E)],
        "q": HFSlice("qkv", take=(0, 2), **packed),
        "k": HFSlice("qkv", take=(2, 4), **packed),
        "v": HFSlice("qkv", take=(4, 9), **packed),
        "q_conv": HFSlice("conv1d", take=(0, 6), **conv),
        "v_conv": HFSlice("conv1d", take=(6, 21), **conv),
        "embedding": HFSlice("embed", copies=("layers.9.embed", "layers.9.head")),
        "bias": HFSlice("e_score_correction_bias", buffer=True),
    }


def theirs(ours):
    """The file's tensors, by expressions of their own."""
    heads = [ours[name].unflatten(0, (Q, -1)) for name in "qkv"]
    return {
        "gate_up_proj": torch.stack((ours["w1"].mT, ours["w3"].mT), -1).flatten(-2),
        "down_proj": ours["w2"].mT,
        "gate_up_proj_bias": torch.stack((ours["b1"], ours["b3"]), -1).flatten(-2),
        **{f"experts.{e}.weight": ours["stack"][e] for e in range(E)},
        "qkv": torch.cat(heads, dim=1).flatten(0, 1),
        "conv1d": torch.cat((ours["q_conv"], ours["v_conv"])).unsqueeze(1),
        **dict.fromkeys(("embed", "layers.9.embed", "layers.9.head"), ours["embedding"]),
        "e_score_correction_bias": ours["bias"],
    }
