"""`config.json` of classes whose layers can have a window, each with its keys. Imports no torch."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from torchtitan.models.args import DecoderArgs, LayerKind
from torchtitan.models.hf.agreement import common_value
from torchtitan.models.hf.config import HFConfig, LayerTypes, all_kinds
from torchtitan.models.hf.rope import Rope, merge_ropes, write_scaling


class OneWindow(HFConfig):
    """Classes whose layers all have a window, if `sliding_window` is set."""

    sliding_window: int | None = None

    def layer_kinds(self) -> Sequence[LayerKind]:
        kind: LayerKind = "full" if self.sliding_window is None else "window"
        return [kind] * self.num_hidden_layers


class LaterWindows(HFConfig):
    """Classes where all layers after the first `max_window_layers` can see a window: Qwen2's and
    Qwen3's.
    """

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: LayerTypes = None

    def layer_kinds(self) -> Sequence[LayerKind]:
        if self.layer_types is not None:
            if "window" in self.layer_types and not self.use_sliding_window:
                raise ValueError(
                    "layer_types has 'sliding_attention', but use_sliding_window is false; set it "
                    "to true, or remove layer_types"
                )
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
    """Classes whose layers with a window have separate rotary positions.

    transformers 5 has `rope_parameters` by kind of layer. Version 4 has `rope_theta` and
    `rope_scaling` of layers with full attention; layers with a window are never scaled.
    """

    default_window_theta: ClassVar[float]
    """RoPE's base in layers with a window if `config.json` has none."""

    rope_parameters: LayerRopes | None = None  # type: ignore[assignment]

    def ropes(self) -> dict[str, Any]:
        by_layer = self.rope_parameters or LayerRopes()
        key = "rope_parameters.sliding_attention"
        full = merge_ropes(
            {
                "rope_scaling": self.rope_scaling,
                "rope_parameters.full_attention": by_layer.full_attention,
            },
            {"rope_theta": self.rope_theta},
        )
        window = by_layer.sliding_attention
        window_theta = common_value(
            {
                "rope_local_base_freq": getattr(self, "rope_local_base_freq", None),
                f"{key}.rope_theta": window.rope_theta,
            }
        )
        for rope in (full, window):
            if rope.truncate is False:  # transformers 5 looks for it beside the kinds of layers
                raise ValueError("truncate of YaRN must be true: transformers 5 doesn't read it")
            if common_value({"": rope.partial_rotary_factor}) not in (None, 1):
                raise ValueError("partial_rotary_factor must be 1: RoPE of whole heads")
        theta = full.rope_theta or self.default_theta
        scaling = full.scaling(self.max_position_embeddings)
        window_scaling = window.scaling(self.max_position_embeddings)
        if window_scaling not in (None, scaling):
            raise ValueError(f"{key}: must be plain RoPE, or scaled like full_attention's")
        window_theta = window_theta or self.default_window_theta
        return {
            "rope_theta": theta,
            "rope_scaling": scaling,
            "window_rope_theta": None if window_theta == theta else window_theta,
            "scale_window_rope": scaling is not None and window_scaling == scaling,
        }

    @classmethod
    def write_rope(cls, args: DecoderArgs) -> dict[str, Any]:
        plain: dict[str, Any] = {"rope_type": "default"}
        scaling = write_scaling(args.rope_scaling)
        if scaling:
            scaling.pop("truncate", None)
        window_scaling = scaling if args.scale_window_rope else None
        window_theta = args.window_rope_theta or args.rope_theta
        keys: dict[str, Any] = {
            "rope_scaling": scaling,
            "rope_parameters": {
                "full_attention": (scaling or plain) | {"rope_theta": args.rope_theta},
                "sliding_attention": (window_scaling or plain) | {"rope_theta": window_theta},
            },
        }
        if "rope_local_base_freq" in cls.model_fields:
            keys["rope_local_base_freq"] = window_theta
        return keys
