"""Exchange of models with transformers: whether they can be expressed there, and the names of their
weights. Imports torch only for models that can't.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from torchtitan.config.load.render import to_toml_value
from torchtitan.models.args import DecoderArgs
from torchtitan.models.hf.config import effective_values
from torchtitan.models.hf_names import is_buffer, parameters_of
from torchtitan.models.spec import HFMap, ModelArgs, ModelSpec, all_families, matrices
from torchtitan.utils.errors import ConfigError


def hf_map(spec: ModelSpec) -> HFMap:
    """The conversion of a family.

    Raises:
        ConfigError: it has none.
    """
    if spec.hf is None:
        raise ConfigError([_NO_CLASS.format(name=spec.name)])
    return spec.hf


_NO_CLASS = (
    "the model family {name!r} names no class of Hugging Face's transformers that computes what "
    "its `build` does; if there is one, state it as `hf=` of the family's ModelSpec"
)


def export_problems(spec: ModelSpec, args: ModelArgs) -> list[str]:
    """Reasons why Hugging Face's class of the family can't express a model; empty if it can.

    Args:
        args: the model's hyper-parameters.
    """
    if spec.hf is None:
        return [_NO_CLASS.format(name=spec.name)]
    kind = spec.hf.model_type
    return [
        f"model.overrides.{name}: Hugging Face's {kind} has no such setting and computes with "
        f"{_show(only)}, this model with {_show(getattr(args, name))}"
        f"{_other_families(spec, args)}"
        for name, only in _differing(spec.hf, args).items()
    ]


def differing_settings(args: ModelArgs, other: ModelArgs) -> dict[str, str]:
    """The hyper-parameters by which two models of a family differ, each as the setting that makes
    `args` like `other`. The length of rows and modules that only train may differ.
    """
    ours, theirs = (
        effective_values(each) if isinstance(each, DecoderArgs) else each.model_dump()
        for each in (args, other)
    )
    return {
        name: f"{name} = {_show(getattr(other, name))}"
        for name, value in theirs.items()
        if name not in ("max_seq_len", "n_mtp")
        and hasattr(args, name)
        and ours.get(name, getattr(args, name)) != value
    }


def _differing(hf: HFMap, args: ModelArgs) -> Mapping[str, Any]:
    return {name: only for name, only in hf.fixed(args).items() if getattr(args, name) != only}


def _other_families(spec: ModelSpec, args: ModelArgs) -> str:
    """Advice that names families with the same code whose class in transformers can express the
    model.
    """
    able = []
    for other in all_families():
        if other.build is not spec.build or other.hf is None or _differing(other.hf, args):
            continue
        size = next(iter(other.flavors.values()))
        if bool(other.expert_sizes(size)) == bool(spec.expert_sizes(args)):
            able.append(to_toml_value(other.name))
    if not able:
        return ""
    return (
        f"; set model.name = {' or '.join(able)}, whose class computes that, or export with "
        "`ckpt to-hf --model`"
    )


def _show(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    return '"none"' if value is None else to_toml_value(value)


def exported_buffers(spec: ModelSpec, args: ModelArgs) -> list[str]:
    """Names of a model's buffers that Hugging Face's class stores."""
    if spec.hf is None:
        return []
    return [ours for ours, theirs in spec.hf.names(args).items() if is_buffer(theirs)]


def parameter_names(spec: ModelSpec, args: ModelArgs) -> list[str]:
    """Names of a model's parameters: from its conversion if it has one, else from a model on the
    meta device.
    """
    if spec.hf is not None and not _differing(spec.hf, args):
        return parameters_of(spec.hf.names(args))
    return [name for name, _ in _meta_model(spec, args).named_parameters()]


def block_matrices(spec: ModelSpec, args: ModelArgs) -> list[str]:
    """Names of the matrices in a model's blocks."""
    return [name for name in matrices(_meta_model(spec, args)) if name.startswith("layers.")]


def _meta_model(spec: ModelSpec, args: ModelArgs) -> Any:
    import torch

    with torch.device("meta"):
        return spec.build(args, None)
