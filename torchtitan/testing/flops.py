"""Check the FLOPs that a model family declares: MFU and the balance of pipelines rest on them."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.spec import ModelArgs, ModelSpec

_SAME = 0.01
"""Largest relative difference between FLOPs that are declared and counted."""


def flops_mismatch(spec: ModelSpec, args: ModelArgs, seq_len: int) -> str | None:
    """A sentence on declared FLOPs that differ from the model's matrix products, or None.

    Torch counts a forward on the meta device, which computes nothing.
    """
    with torch.device("meta"):
        model: Any = spec.build(args, attention_backend("cpu"))
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        options = {"token_weights": torch.ones(1, seq_len)} if spec.expert_sizes(args) else {}
        if mtp_modules := spec.mtp_modules(args):
            tokens = tokens.unsqueeze(-1).expand(-1, -1, 1 + mtp_modules)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(tokens, torch.arange(seq_len), None, **options)
    flops = 3 * counter.get_total_flops() / seq_len  # a backward computes two products for each
    declared = spec.flops_per_token(args, seq_len)
    if abs(declared - flops) <= _SAME * flops:
        return None
    return (
        f"module_flops declares {declared:.4g} FLOPs per token, {declared / flops - 1:+.0%} to the "
        f"{flops:.4g} of the model's matrix products, and TFLOP/s and MFU are off by as much; pass "
        "module_flops= to its ModelSpec"
    )
