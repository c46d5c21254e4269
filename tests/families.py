"""Tiny models of the built-in families, and their twins in transformers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan.models import get_spec
from torchtitan.models.layers import attention_backend

TINY = {
    "vocab_size": 160,
    "dim": 64,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 2,
    "ffn_dim": 96,
    "max_seq_len": 128,
}
EXPERTS = {"n_experts": 8, "experts_per_token": 3, "expert_dim": 24, "n_dense_layers": 1}
SIZES: dict[str, dict[str, Any]] = {
    "llama3": {},
    "mistral": {"head_size": 12},
    "qwen2_5": {},
    "qwen3": {"head_size": 12},
    "qwen3_moe": {"head_size": 12, **EXPERTS},
}
"""By family. Heads are not `dim / n_heads` wide where a family allows that."""


def build(family: str, **overrides: Any) -> Any:
    spec = get_spec(family)
    return spec.build(
        spec.args("debugmodel", TINY | SIZES[family] | overrides), attention_backend("cpu")
    )


def twin(family: str, model: Any) -> Any:
    """transformers' model of the same hyper-parameters, with random weights, which `model` gets
    too.
    """
    transformers = pytest.importorskip("transformers")
    hf = get_spec(family).hf
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**hf.config(model.args, "float32"))
    ).eval()
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            param.uniform_(0.5, 1.5) if "norm" in name else param.normal_(std=0.08)
        weights = as_ours(family, model, dict(theirs.named_parameters()))
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    return theirs


def as_ours(family: str, model: Any, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' parameters by our names."""
    parts: dict[str, Tensor] = {}
    for name, value in theirs.items():
        place, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            parts[name] = value
            continue
        for i, expert in enumerate(value):  # in memory they are stacks too, but not in files
            both = expert.chunk(2) if last == "gate_up_proj" else (expert,)
            for key, part in zip(
                ("gate_proj", "up_proj") if len(both) == 2 else (last,), both, strict=True
            ):
                parts[f"{place}.{i}.{key}.weight"] = part
    names = get_spec(family).hf.names(model.args)
    return {
        ours: parts[theirs]
        if isinstance(theirs, str)
        else torch.stack([parts[part] for part in theirs])
        for ours, theirs in names.items()
    }


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())
