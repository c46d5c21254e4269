"""OLMo 3 (Team OLMo, "Olmo 3", arXiv:2512.13961)."""

from functools import partial
from typing import Any, ClassVar, Literal

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.config import LayerTypes
from torchtitan.models.hf.windows import RopeByLayer
from torchtitan.models.rope_scaling import YarnScaling


class _Config(RopeByLayer):
    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    default_theta = 500_000.0
    default_window_theta = 500_000.0
    full_every = 4
    qk_norm = True
    qk_norm_whole: ClassVar = True
    norm_placement: ClassVar = "after"
    rms_norm_eps: float = 1e-5
    attention_bias: Literal[False] = False
    sliding_window: int | None = 4096
    layer_types: LayerTypes = None

    def ropes(self) -> dict[str, Any]:
        ropes = super().ropes()
        windows = self.rope_parameters and self.rope_parameters.sliding_attention.rope_theta
        if self.rope_theta not in (None, self.default_window_theta) and not windows:
            raise ValueError(
                f"rope_theta is {self.rope_theta:g}: in layers with a window, transformers 4 uses "
                f"it, too, and 5 {self.default_window_theta:g}; give "
                "rope_parameters.full_attention.rope_theta and "
                "rope_parameters.sliding_attention.rope_theta instead"
            )
        return ropes


_olmo3 = partial(
    DecoderArgs,
    vocab_size=100278,
    layer_pattern=("window", "window", "window", "full"),
    window=4096,
    scale_window_rope=False,
    qk_norm=True,
    qk_norm_whole=True,
    norm_placement="after",
    norm_eps=1e-6,
)

_7b = partial(_olmo3, dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008)
_32b = partial(_olmo3, dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27648)
_YARN = YarnScaling(
    factor=8.0, original_max_seq_len=8192, attention_factor=1.2079441541679836
)  # of the long-context stage, from 8,192 tokens to 65,536

FLAVORS = {
    "debugmodel": _olmo3(**DEBUG_SIZES, n_layers=8, n_heads=8, n_kv_heads=4, window=64),
    "7B": _7b(),
    "32B": _32b(),
    "7B-64k": _7b(rope_scaling=_YARN),
    "32B-64k": _32b(rope_scaling=_YARN),
}

spec = register_decoder("olmo3", FLAVORS, _Config)
