"""What can be exchanged with Hugging Face's transformers. Imports no torch, unless a family has
names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan.config.load.render import to_toml_value
from torchtitan.models.spec import HFMap, ModelSpec, families
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
    "the model family {name!r} names no class of Hugging Face's transformers that "
    "computes what its `build` does; if "
    "there is one, state it as `hf=` of the family's ModelSpec"
)


def export_problems(spec: ModelSpec, args: Any) -> list[str]:
    """Why Hugging Face's class of the family can't express a model; empty if it can.

    Args:
        args: the model's hyper-parameters.
    """
    if spec.hf is None:
        return [_NO_CLASS.format(name=spec.name)]
    out = []
    for name, only in _differing(spec.hf, args).items():
        out.append(
            f"model.overrides.{name}: Hugging Face's {spec.hf.model_type} has no such "
            "setting and computes with "
            f"{_shown(only)}, this model with {_shown(getattr(args, name))}"
            f"{_other_families(spec, args)}"
        )
    return out


def _differing(hf: HFMap, args: Any) -> Mapping[str, Any]:
    return {name: only for name, only in hf.fixed(args).items() if getattr(args, name) != only}


def _other_families(spec: ModelSpec, args: Any) -> str:
    """Families of the same code whose class does express the model; a dense model is none of a
    mixture's.
    """
    able = []
    for other in families():
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


def _shown(value: Any) -> str:
    return '"none"' if value is None else to_toml_value(value)


def parameter_names(spec: ModelSpec, args: Any) -> list[str]:
    """Names of a model's parameters. Without a conversion they are read off the model, which
    imports torch.
    """
    if spec.hf is not None:
        return list(spec.hf.names(args))
    import torch

    with torch.device("meta"):
        return [name for name, _ in spec.build(args, None).named_parameters()]
