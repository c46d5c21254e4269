"""Llama 3 (Llama Team, "The Llama 3 Herd of Models", arXiv:2407.21783)."""

from typing import Any

from torchtitan.models.llama3 import hf
from torchtitan.models.llama3.args import (
    FLAVORS,
    TENSOR_PARALLEL_STYLES,
    LlamaArgs,
    init,
    module_flops,
    tensor_parallel_sizes,
    tied_modules,
    tiny,
)
from torchtitan.models.spec import ModelSpec, register

__all__ = ["LlamaArgs", "spec"]


def _build(args: LlamaArgs, *rest: Any) -> Any:
    from torchtitan.models.llama3.model import Llama  # torch only when a model is really built

    return Llama(args, *rest)


spec = register(
    ModelSpec(
        name="llama3",
        flavors=FLAVORS,
        build=_build,
        init=init,
        module_flops=module_flops,
        tied_modules=tied_modules,
        tensor_parallel_styles=TENSOR_PARALLEL_STYLES,
        tensor_parallel_sizes=tensor_parallel_sizes,
        tiny=tiny,
        hf=hf,
    )
)
