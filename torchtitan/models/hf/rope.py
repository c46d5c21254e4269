"""RoPE in a `config.json` of Hugging Face's transformers. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, model_validator

from torchtitan.models.hf.agreement import common_value
from torchtitan.models.rope_scaling import AnyScaling, LinearScaling, RopeScaling, YarnScaling

_SCALINGS: dict[str, type[RopeScaling | YarnScaling | LinearScaling]] = {
    "llama3": RopeScaling,
    "yarn": YarnScaling,
    "linear": LinearScaling,
}
_ORIGINAL = "original_max_position_embeddings"
_SHARPENING = ("attention_factor", "mscale", "mscale_all_dim")
"""Keys whose values YaRN computes itself if they are absent."""


class Rope(BaseModel):
    """RoPE's settings for one kind of layer. Some keys have other names in other versions of
    transformers.
    """

    model_config = {"strict": True}

    rope_type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _merge_types(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "type" not in values:
            return values
        kind = common_value({name: values.get(name) for name in ("rope_type", "type")})
        return {name: value for name, value in values.items() if name != "type"} | {
            "rope_type": kind
        }

    @property
    def kind(self) -> str:
        return self.rope_type or "default"

    def scaling(self, max_seq_len: int) -> AnyScaling | None:
        """
        Args:
            max_seq_len: `max_position_embeddings`, the default of YaRN's original length.

        Raises:
            ValueError: the type is unknown, or a key is missing.
        """
        if self.kind == "default":
            return None
        scaling = _SCALINGS.get(self.kind)
        if scaling is None:
            choices = ", ".join(repr(kind) for kind in _SCALINGS)
            raise ValueError(
                f"RoPE scaling of type {self.kind[:40]!r}, must be one of {choices}, or none"
            )
        values: dict[str, Any] = {"type": self.kind}
        for name in scaling.model_fields.keys() - {"type"}:
            value = getattr(self, _ORIGINAL if name == "original_max_seq_len" else name)
            if value is not None:
                values[name] = value
        if self.kind == "yarn":
            values.setdefault("original_max_seq_len", max_seq_len)
        factors = {"factor"} if self.kind == "yarn" else scaling.model_fields.keys() - {"type"}
        if factors - values.keys():
            raise ValueError(f"RoPE scaling of type {self.kind!r} lacks some of its factors")
        return scaling.model_validate(values)


def merge_ropes(ropes: Mapping[str, Rope | None], outer: Mapping[str, Any]) -> Rope:
    """RoPE's settings from all places of a `config.json`.

    Args:
        ropes: settings by their key.
        outer: keys outside of `ropes` for single settings.

    Raises:
        ValueError: two places contradict each other.
    """
    settings = {key: rope.model_dump() for key, rope in ropes.items() if rope is not None}
    values = {}
    for name in Rope.model_fields:
        nested = {f"{key}.{name}": values[name] for key, values in settings.items()}
        values[name] = common_value({name: outer.get(name)} | nested)
    return Rope(**values)


def write_scaling(scaling: AnyScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of a `config.json`, as transformers 4 and 5 read it."""
    if scaling is None:
        return None
    values = scaling.model_dump()
    kind = values.pop("type")
    for name in _SHARPENING:
        if values.get(name, 0) is None:
            del values[name]
    if "original_max_seq_len" in values:
        values[_ORIGINAL] = values.pop("original_max_seq_len")
    return {"rope_type": kind, **values}
