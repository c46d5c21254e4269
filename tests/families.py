"""Tiny models of the built-in families, and their twins in transformers."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan.checkpoint.hf.folder import SafetensorsReader
from torchtitan.models import HFNames, get_spec
from torchtitan.models.attention.backend import attention_backend

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
    "gpt_oss": {"head_size": 12, "n_experts": 8, "experts_per_token": 3, "expert_dim": 24},
    "olmo3": {},
    "gemma3": {"head_size": 12, "embedding_scale": 8.0},
    "smollm3": {},
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
    spec = get_spec(family)
    theirs = random_twin(spec.hf.config(model.args, "float32"))
    names = spec.hf.names(model.args)
    with torch.no_grad():
        for name, value in as_ours(names, theirs).items():
            model.get_parameter(name).copy_(value)
    return theirs


def random_twin(config: Mapping[str, Any], **settings: Any) -> Any:
    """transformers' model of a `config.json`, in fp32 with random weights, none of them 0."""
    transformers = pytest.importorskip("transformers")
    about = transformers.AutoConfig.for_model(**config)
    theirs = transformers.AutoModelForCausalLM.from_config(about, **settings).eval().float()
    with torch.no_grad():
        for name, value in theirs.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                value.uniform_(-0.6, 0.2)  # beside scores of about 0.5: some sums are negative
            elif value.dim() > 1:
                value.normal_(std=0.08)
            else:  # norms at 1, or at 0 if they multiply by 1 + weight; biases; sinks
                value.add_(torch.empty_like(value).uniform_(-0.5, 0.5))
    return theirs


def as_ours(names: HFNames, theirs: Any, *, gradients: bool = False) -> dict[str, Tensor]:
    """The weights of transformers' model by our names, or their gradients, as their own code writes
    them to a file: in memory they may be arranged otherwise.
    """
    state = theirs.state_dict(keep_vars=True)
    if gradients:
        state = {
            name: value.grad if isinstance(value, nn.Parameter) else value
            for name, value in state.items()
        }
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder, state_dict={n: x.detach() for n, x in state.items()})
        reader = SafetensorsReader(Path(folder), names)
        return {ours: reader.read(ours) for ours in names}


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())
