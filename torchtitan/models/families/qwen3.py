"""Qwen3 (Qwen Team, "Qwen3 Technical Report", arXiv:2505.09388), dense sizes."""

from functools import partial
from typing import Literal

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.windows import LaterWindows


class _Config(LaterWindows):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True
    explicit_head_size = True
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    attention_bias: Literal[False] = False


_qwen3 = partial(
    DecoderArgs,
    vocab_size=151936,
    n_kv_heads=8,
    head_size=128,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
)

FLAVORS = {
    "debugmodel": _qwen3(**DEBUG_SIZES, n_layers=6, n_heads=8, n_kv_heads=4, head_size=64),
    "0.6B": _qwen3(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tie_embeddings=True),
    "1.7B": _qwen3(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, tie_embeddings=True),
    "4B": _qwen3(dim=2560, n_layers=36, n_heads=32, ffn_dim=9728, tie_embeddings=True),
    "8B": _qwen3(dim=4096, n_layers=36, n_heads=32, ffn_dim=12288),
    "14B": _qwen3(dim=5120, n_layers=40, n_heads=40, ffn_dim=17408),
    "32B": _qwen3(dim=5120, n_layers=64, n_heads=64, ffn_dim=25600),
}

spec = register_decoder("qwen3", FLAVORS, _Config)
