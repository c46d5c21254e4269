"""Ways to stretch RoPE for longer contexts, as hyper-parameters. Imports no torch."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from torchtitan.config.types import SeqLen
from torchtitan.models.spec import ModelArgs

Scale = Annotated[float, Field(gt=0, le=10**6)]


class RopeScaling(BaseModel):
    """Llama 3.1's scaling of RoPE's low frequencies for longer contexts (arXiv:2407.21783, section
    3.4.2).
    """

    model_config = ModelArgs.model_config

    type: Literal["llama3"] = "llama3"
    factor: Scale = 8.0
    """Factor by which long wavelengths are stretched."""
    low_freq_factor: Scale = 1.0
    """Wavelengths above `original_max_seq_len / low_freq_factor` are stretched by `factor`."""
    high_freq_factor: Scale = 4.0
    """Wavelengths below `original_max_seq_len / high_freq_factor` are unchanged."""
    original_max_seq_len: SeqLen = 8192
    """Context length of the first pretraining stage."""

    @model_validator(mode="after")
    def _check_order(self) -> "RopeScaling":
        if self.low_freq_factor >= self.high_freq_factor:
            low = self.low_freq_factor
            high = self.high_freq_factor
            raise ValueError(f"low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
        return self


class YarnScaling(BaseModel):
    """YaRN (Peng et al., arXiv:2309.00071): low frequencies are divided by `factor`, high ones
    kept, and attention is sharpened.
    """

    model_config = ModelArgs.model_config

    type: Literal["yarn"] = "yarn"
    factor: Scale = 8.0
    """Factor by which the context grows."""
    original_max_seq_len: SeqLen = 8192
    """Context length of the first pretraining stage."""
    beta_fast: Scale = 32.0
    """Frequencies with more periods than this in `original_max_seq_len` are unchanged."""
    beta_slow: Scale = 1.0
    """Frequencies with fewer periods than this are divided by `factor`."""
    truncate: bool = True
    """Round the bounds between unchanged and divided frequencies to whole features."""
    attention_factor: Scale | None = None
    """Multiplies cosine and sine, and so attention's scores by its square. `"none"`: computed from
    `mscale` and `mscale_all_dim` if they are set, else `0.1 ln(factor) + 1`.
    """
    mscale: Scale | None = None
    """DeepSeek's numerator: cosine and sine are multiplied by the ratio of `0.1 mscale ln(factor) +
    1` to the same with `mscale_all_dim`.
    """
    mscale_all_dim: Scale | None = None
    """DeepSeek's denominator. Latent attention multiplies its scores by the square of `0.1
    mscale_all_dim ln(factor) + 1`.
    """

    def magnitude(self, mscale: float = 1.0) -> float:
        """`0.1 mscale ln(factor) + 1`: equation 22, squared root."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    @property
    def rope_factor(self) -> float:
        """Factor of cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude()

    @property
    def score_factor(self) -> float:
        """Factor of latent attention's scores."""
        return self.magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


class LinearScaling(BaseModel):
    """Positions divided by a factor (Chen et al., arXiv:2306.15595)."""

    model_config = ModelArgs.model_config

    type: Literal["linear"] = "linear"
    factor: Scale = 8.0
    """Factor by which all wavelengths are stretched."""


def _scaling_type(value: Any) -> str:
    kind = value.get("type", "llama3") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


AnyScaling = Annotated[
    Annotated[RopeScaling, Tag("<llama3>")]
    | Annotated[YarnScaling, Tag("<yarn>")]
    | Annotated[LinearScaling, Tag("<linear>")],
    Discriminator(
        _scaling_type,
        custom_error_type="rope_scaling",
        custom_error_message="type must be one of llama3, yarn, linear",
    ),
]
