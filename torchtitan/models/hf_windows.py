"""Keys of windows, and of rotary positions by kind of layer, in a `config.json` of Hugging Face's
transformers. Imports no torch.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from torchtitan.models.decoder_args import DecoderArgs, LayerKind
from torchtitan.models.decoder_hf import HFConfig
from torchtitan.models.hf_layers import LayerTypes, all_kinds
from torchtitan.models.hf_rope import Rope, write_scaling


class LaterWindows(HFConfig):
    """Classes where all layers after the first `max_window_layers` can see a window: Qwen2's and
    Qwen3's.
    """

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: LayerTypes = None

    def hyper_parameters(self) -> dict[str, Any]:
        values = super().hyper_parameters()
        return values if self.use_sliding_window else values | {"window": None}

    def layer_kinds(self) -> Sequence[LayerKind]:
        if self.layer_types is not None:
            return super().layer_kinds()
        first = self.num_hidden_layers
        if self.use_sliding_window and self.sliding_window is not None:
            first = self.max_window_layers
        return ["full" if i < first else "window" for i in range(self.num_hidden_layers)]

    @classmethod
    def write_layers(cls, args: DecoderArgs) -> dict[str, Any]:
        if "window" not in args.kinds:
            return {"use_sliding_window": False}
        # transformers 4 reads only this number
        first = all_kinds(args).index("window")
        return super().write_layers(args) | {"use_sliding_window": True, "max_window_layers": first}


class LayerRopes(BaseModel):
    """`rope_parameters` by kind of layer."""

    model_config = {"strict": True, "extra": "forbid"}

    full_attention: Rope = Rope()
    sliding_attention: Rope = Rope()


class RopeByLayer(HFConfig):
    """Classes whose layers with a window have rotary positions of their own.

    transformers 5 has `rope_parameters` by kind of layer. Version 4 has `rope_theta` and
    `rope_scaling` of layers with full attention; those with a window are never scaled.
    """

    default_window_theta: ClassVar[float | None] = None
    """RoPE's base in layers with a window where `config.json` gives none. None: that of the others.
    """

    rope_parameters: LayerRopes | None = None  # type: ignore[assignment]

    def ropes(self) -> dict[str, Any]:
        both = self.rope_parameters or LayerRopes(full_attention=self.rope_scaling or Rope())
        length = self.max_position_embeddings
        full = both.full_attention
        window = both.sliding_attention
        theta = full.rope_theta or self.rope_theta or self.default_theta
        other = (
            window.rope_theta
            or getattr(self, "rope_local_base_freq", None)
            or self.default_window_theta
        )
        scaling = full.scaling(length)
        of_window = window.scaling(length)
        if of_window not in (None, scaling):
            raise ValueError(
                "rope_parameters.sliding_attention: must be plain RoPE, or scaled like "
                "full_attention's"
            )
        return {
            "rope_theta": theta,
            "rope_scaling": scaling,
            "window_rope_theta": None if other == theta else other,
            "scale_window_rope": of_window == scaling,
        }

    @classmethod
    def write_rope(cls, args: DecoderArgs) -> dict[str, Any]:
        plain: dict[str, Any] = {"rope_type": "default"}
        scaling = write_scaling(args.rope_scaling)
        of_window = scaling if args.scale_window_rope else None
        window_theta = args.window_rope_theta or args.rope_theta
        found: dict[str, Any] = {
            "rope_scaling": scaling,
            "rope_parameters": {
                "full_attention": (scaling or plain) | {"rope_theta": args.rope_theta},
                "sliding_attention": (of_window or plain) | {"rope_theta": window_theta},
            },
        }
        if "rope_local_base_freq" in cls.model_fields:
            found["rope_local_base_freq"] = window_theta
        return found
