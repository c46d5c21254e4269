"""OLMo 2 (OLMo Team, "2 OLMo 2 Furious", arXiv:2501.00656)."""

from functools import partial
from typing import ClassVar, Literal

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.config import HFConfig


class _Config(HFConfig):
    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    qk_norm = True
    qk_norm_whole: ClassVar = True
    norm_placement: ClassVar = "after"
    rms_norm_eps: float = 1e-5
    attention_bias: Literal[False] = False


_olmo2 = partial(
    DecoderArgs,
    vocab_size=100352,
    qk_norm=True,
    qk_norm_whole=True,
    norm_placement="after",
    norm_eps=1e-6,
)

FLAVORS = {
    "debugmodel": _olmo2(**DEBUG_SIZES, n_layers=6, n_heads=8, n_kv_heads=4),
    "1B": _olmo2(dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, ffn_dim=8192),
    "7B": _olmo2(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008),
    "13B": _olmo2(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13824),
    "32B": _olmo2(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27648),
}

spec = register_decoder("olmo2", FLAVORS, _Config)
