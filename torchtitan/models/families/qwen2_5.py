"""Qwen2.5 (Qwen Team, "Qwen2.5 Technical Report", arXiv:2412.15115), dense sizes, with
Qwen2.5-Coder (arXiv:2409.12186) and Qwen2.5-Math (arXiv:2409.12122).
"""

from functools import partial
from typing import ClassVar

from torchtitan.models.args import DEBUG_SIZES, DecoderArgs
from torchtitan.models.decoder.traits import register_decoder
from torchtitan.models.hf.windows import LaterWindows


class _Config(LaterWindows):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    qkv_bias: ClassVar = True
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768


_qwen2_5 = partial(DecoderArgs, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True)
_small = partial(_qwen2_5, vocab_size=151936, tie_embeddings=True)
_large = partial(_qwen2_5, vocab_size=152064, n_kv_heads=8)

_SIZES = {
    "0.5B": _small(dim=896, n_layers=24, n_heads=14, n_kv_heads=2, ffn_dim=4864),
    "1.5B": _small(dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, ffn_dim=8960),
    "3B": _small(dim=2048, n_layers=36, n_heads=16, n_kv_heads=2, ffn_dim=11008),
    "7B": _large(dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18944),
    "14B": _large(dim=5120, n_layers=48, n_heads=40, ffn_dim=13824, norm_eps=1e-5),
    "32B": _large(dim=5120, n_layers=64, n_heads=40, ffn_dim=27648, norm_eps=1e-5),
    "72B": _large(dim=8192, n_layers=80, n_heads=64, ffn_dim=29568, norm_eps=1e-5),
}
FLAVORS = {
    "debugmodel": _qwen2_5(**DEBUG_SIZES, n_layers=6, n_heads=8, n_kv_heads=4),
    **_SIZES,
    **{f"Coder-{size}": args for size, args in _SIZES.items() if size != "72B"},
    **{
        f"Math-{size}": _SIZES[size].model_copy(update={"rope_theta": 1e4})
        for size in ("1.5B", "7B", "72B")
    },
}

spec = register_decoder("qwen2_5", FLAVORS, _Config)
