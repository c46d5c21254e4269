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
from torchtitan.models.spec import HFMap, ModelSpec, register

__all__ = ["LlamaArgs", "spec"]


def _build(args: LlamaArgs, attend: Any) -> Any:
    from torchtitan.models.llama3.model import Llama  # imports torch, which a configuration is checked without

    return Llama(args, attend)


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
        hf=HFMap(hf.names, hf.config, hf.args),
    )
)
