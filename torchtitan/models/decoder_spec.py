"""A family of decoders, from its sizes and the `config.json` of its Hugging Face models."""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.decoder_args import DecoderArgs
from torchtitan.models.decoder_checks import unused
from torchtitan.models.decoder_hf import HFConfig
from torchtitan.models.decoder_traits import (
    TENSOR_PARALLEL_STYLES,
    context_parallel_sizes,
    expert_sizes,
    init,
    module_flops,
    tensor_parallel_sizes,
    tied_modules,
    tiny,
)
from torchtitan.models.mup import width_ratio
from torchtitan.models.spec import ModelSpec, register


def register_decoder(
    name: str, flavors: Mapping[str, DecoderArgs], hf: type[HFConfig]
) -> ModelSpec:
    """Make a family of decoders available as `model.name`."""
    return register(
        ModelSpec(
            name=name,
            flavors=flavors,
            build=_build,
            init=init,
            module_flops=module_flops,
            tied_modules=tied_modules,
            tensor_parallel_styles=TENSOR_PARALLEL_STYLES,
            tensor_parallel_sizes=tensor_parallel_sizes,
            tiny=tiny,
            hf=hf.map(),
            expert_sizes=expert_sizes,
            context_parallel_sizes=context_parallel_sizes,
            mtp_modules=lambda args: args.n_mtp,
            unused=unused,
            width_ratio=width_ratio,
        )
    )


def is_decoder(spec: ModelSpec) -> bool:
    """Whether a family is the decoder itself, with sizes and flags of its own, but no code."""
    return spec.build is _build and spec.module_flops is module_flops


def _build(args: DecoderArgs, attend: Any) -> Any:
    # imports torch, which a configuration is checked without
    from torchtitan.models.decoder import Decoder

    return Decoder(args, attend)
