"""Llama 3 (Llama Team, "The Llama 3 Herd of Models", arXiv:2407.21783)."""

from typing import Any

from torchtitan.models.llama3 import hf
from torchtitan.models.llama3.args import FLAVORS, LlamaArgs, flops_per_token, init
from torchtitan.models.spec import ModelSpec, register

__all__ = ["LlamaArgs", "spec"]


def _build(args: LlamaArgs, *rest: Any) -> Any:
    from torchtitan.models.llama3.model import Llama  # torch only when a model is really built

    return Llama(args, *rest)


spec = register(ModelSpec("llama3", FLAVORS, _build, init, flops_per_token, hf))
