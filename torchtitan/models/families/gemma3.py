"""Gemma 3 (Gemma Team, "Gemma 3 Technical Report", arXiv:2503.19786), without its vision tower."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from torchtitan.config.types import Layers
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.config import LayerTypes
from torchtitan.models.hf.windows import RopeByLayer
from torchtitan.models.rope_scaling import LinearScaling


class _Config(RopeByLayer):
    model_type = "gemma3_text"
    also_read = ("gemma3",)
    architecture = "Gemma3ForCausalLM"
    ignored = tuple(
        f"{prefix}{tower}.*"
        for prefix in ("", "model.")
        for tower in ("vision_tower", "multi_modal_projector")
    )
    keys: ClassVar = {
        "logit_softcap": "final_logit_softcapping",
        "window_rope_theta": "rope_local_base_freq",
    }
    explicit_head_size = True
    default_theta = 1e6
    default_window_theta = 1e4
    qk_norm = True
    norm_placement: ClassVar = "both"
    norm_plus_one: ClassVar = True
    activation: ClassVar = "geglu"
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"  # type: ignore[assignment]
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    attention_bias: Literal[False] = False
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: None = None
    use_bidirectional_attention: Literal[False] | None = False
    rope_local_base_freq: float | None = None
    sliding_window: int | None = 4096
    sliding_window_pattern: Annotated[int, Field(ge=1)] = 6
    layer_types: LayerTypes = None

    def hyper_parameters(self) -> dict[str, Any]:
        values = super().hyper_parameters()
        values["embedding_scale"] = math.sqrt(self.hidden_size)
        if self.query_pre_attn_scalar != self.head_dim:
            values["attention_scale"] = self.query_pre_attn_scalar**-0.5
        return values

    @classmethod
    def write(cls, args: DecoderArgs, dtype: str) -> dict[str, Any]:
        scale = args.attention_scale or args.head_dim**-0.5
        return super().write(args, dtype) | {"query_pre_attn_scalar": round(scale**-2)}


def _gemma3(dim: int, **sizes: Any) -> DecoderArgs:
    values: dict[str, Any] = {
        "vocab_size": 262208,
        "head_size": 256,
        "layer_pattern": ("window",) * 5 + ("full",),
        "window": 1024,
        "rope_theta": 1e6,
        "window_rope_theta": 1e4,
        "rope_scaling": LinearScaling(factor=8.0),
        "scale_window_rope": False,
        "qk_norm": True,
        "norm_eps": 1e-6,
        "norm_placement": "both",
        "norm_plus_one": True,
        "activation": "geglu",
        "tie_embeddings": True,
        "embedding_scale": math.sqrt(dim),
    }
    return DecoderArgs(dim=dim, **values | sizes)


FLAVORS = {
    "debugmodel": _gemma3(
        256,
        vocab_size=2048,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_size=64,
        window=64,
        ffn_dim=768,
        tie_embeddings=False,  # a pipeline can't split a model whose ends share a weight
    ),
    "1b": _gemma3(
        1152,
        vocab_size=262144,
        n_layers=26,
        n_heads=4,
        n_kv_heads=1,
        ffn_dim=6912,
        window=512,
        rope_scaling=None,
    ),
    "4b": _gemma3(2560, n_layers=34, n_heads=8, n_kv_heads=4, ffn_dim=10240),
    "12b": _gemma3(3840, n_layers=48, n_heads=16, n_kv_heads=8, ffn_dim=15360),
    "27b": _gemma3(
        5376,
        n_layers=62,
        n_heads=32,
        n_kv_heads=16,
        head_size=128,
        attention_scale=168**-0.5,
        ffn_dim=21504,
    ),
}

spec = register_decoder("gemma3", FLAVORS, _Config)
